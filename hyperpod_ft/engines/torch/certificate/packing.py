"""Whether engine torch trains packed documents as they train alone, in every kind of a model's layers."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from hyperpod_ft.checkpoint.formats.located import locate
from hyperpod_ft.engines.certificate.alone import Trained, batch_of, why_not_apart
from hyperpod_ft.engines.certificate.model import documents, rows
from hyperpod_ft.engines.torch.build import whole_model
from hyperpod_ft.engines.torch.loading import skeleton
from hyperpod_ft.engines.torch.model import attention, language_model

_CPU = torch.device("cpu")


def engine_model(directory: Path, *, own_attention: bool) -> PreTrainedModel:
    """The model of `directory` as the engine builds it for one rank, fp32, whose forward pass returns its loss."""
    model = whole_model(directory, torch.float32, own_attention=own_attention)
    weights = locate(model, directory)
    language_model.return_loss(model)
    skeleton.materialize(model, _CPU)
    skeleton.fill(model, weights, {})
    model.train()
    return model


def why_not_unpacked(directory: Path, expected: Trained) -> str:
    """Why the engine would not train documents in rows of their own as transformers does; empty when it would."""
    model = engine_model(directory, own_attention=False)
    inputs = language_model.inputs(batch_of(rows(documents(), packed=False)), _CPU, by_document=True)
    return Trained.of(model, model(**inputs)).in_whole(directory).differs(expected)


def why_not_packed(directory: Path, expected: Trained) -> str:
    """Why the engine would not train the documents of one row as `expected`, alone; empty when it would."""
    masks = (attention.document_bounds, attention.document_numbers)
    build = partial(engine_model, directory, own_attention=True)
    return why_not_apart(directory, expected, build, *(partial(_losses, mask) for mask in masks))


def _losses(mask: Callable[[torch.Tensor], torch.Tensor], model: PreTrainedModel, first_seed: int) -> torch.Tensor:
    batch = batch_of(rows(documents(first_seed), packed=True))
    inputs = language_model.inputs(batch, _CPU, by_document=True) | {"attention_mask": mask(batch.position_ids)}
    losses: torch.Tensor = model(**inputs)
    return losses
