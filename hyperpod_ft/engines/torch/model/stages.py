"""A rank's stages of a pipeline: what is left of a Hugging Face model whose other layers are on other ranks.

Parameters keep their names, so that loading, checkpoints and exports see the parts of one model. A stage computes with
transformers' own forward pass of the decoder, around this stage's layers: every stage makes masks and rotary embeddings
from its own copy of the batch, and only hidden states travel.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hyperpod_ft.engines.torch.model.language_model import LossForward
from hyperpod_ft.errors import UserError

# Where transformers' classes of the families in planning/pipeline.py have them.
_EMBEDDING, _LAYERS, _NORM, _HEAD = "embed_tokens", "layers", "norm", "lm_head"


@dataclass(frozen=True)
class Stage:
    """One of the parts that a batch passes through, one after another."""

    index: int
    count: int  # of all stages
    layers: range

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.count - 1


def keep(model: PreTrainedModel, stages: Sequence[Stage]) -> None:
    """Drop what other ranks have, and let `forward` compute one of this rank's stages: see `_StageForward`.

    The model returns its loss (`language_model.return_loss`) and is on the meta device. An embedding that is tied to
    the output matrix and trained stays on the last stage too: both are saved under its name.
    """
    whole = model.forward
    assert isinstance(whole, LossForward)
    decoder = model.base_model
    first, last = (any(getattr(stage, end) for stage in stages) for end in ("first", "last"))
    layers = getattr(decoder, _LAYERS)
    own = {str(number) for stage in stages for number in stage.layers}
    for name in layers._modules.keys() - own:
        del layers._modules[name]
    if not last:
        delattr(decoder, _NORM)
        delattr(model, _HEAD)
    if not first and not (last and trains_tied_embedding(model)):
        delattr(decoder, _EMBEDDING)
    # transformers' own finds none without an embedding
    model.get_output_embeddings = lambda: getattr(model, _HEAD)
    model.forward = _StageForward(stages, [_view(decoder, stage) for stage in stages], whole)


def trains_tied_embedding(model: PreTrainedModel) -> bool:
    """Whether embedding and output matrix are one parameter that is trained."""
    embedding: Any = getattr(model.base_model, _EMBEDDING, None)
    head: Any = getattr(model, _HEAD, None)
    return embedding is not None and head is not None and head.weight is embedding.weight and head.weight.requires_grad


def embedding_name(model: PreTrainedModel) -> str:
    """The name of the embedding's weight, also for the output matrix that it is tied to."""
    return f"{model.base_model_prefix}.{_EMBEDDING}.weight"


def check_trained(model: PreTrainedModel, stages: Sequence[Stage]) -> None:
    """Raise UserError when one of all the stages would train nothing; on every rank, since `model` is whole."""
    for stage in stages:
        layers = (getattr(model.base_model, _LAYERS)[number] for number in stage.layers)
        if not any(parameter.requires_grad for layer in layers for parameter in layer.parameters()):
            raise UserError(
                f"lora.target_modules: matches nothing in layers {stage.layers[0]} to {stage.layers[-1]}, which are one"
                " pipeline stage",
                "name modules of all layers, or set parallelism.pipeline_parallel to 1",
            )


def _view(decoder: nn.Module, stage: Stage) -> nn.Module:
    """A decoder with this stage's layers, which are those of `decoder`, and with what else the stage computes."""
    layers = getattr(decoder, _LAYERS)
    view = copy.copy(decoder)
    view._modules = dict(decoder._modules)
    setattr(view, _LAYERS, nn.ModuleList(layers._modules[str(number)] for number in stage.layers))
    if not stage.last:
        setattr(view, _NORM, nn.Identity())
    if not stage.first and hasattr(view, "embedding_multiplier"):
        view.embedding_multiplier = 1.0  # Granite's factor of what its forward pass begins with
    config: Any = decoder.config
    if getattr(config, "layer_types", None):
        # of the layers by their place in the list
        view.config = copy.copy(config)
        view.config.layer_types = [config.layer_types[number] for number in stage.layers]
    return view


class _StageForward:
    """The forward pass of one of this rank's stages."""

    def __init__(self, stages: Sequence[Stage], decoders: Sequence[nn.Module], whole: LossForward) -> None:
        self._stages, self._decoders, self._whole = stages, decoders, whole

    def __call__(
        self,
        stage: int,
        hidden: torch.Tensor | None,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        targets: torch.Tensor,
        predicted_at: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states [rows, length, width], or from the last stage the loss of the batch, fp32 [].

        `stage`: its place among the rank's own; `hidden`: what the stage before returned, None for the first. The
        others are the inputs of the whole model.
        """
        start = {"input_ids": input_ids} if hidden is None else {"inputs_embeds": hidden}
        hidden = self._whole.decode(self._decoders[stage], position_ids, attention_mask, **start)
        return self._whole.loss(hidden, targets, predicted_at) if self._stages[stage].last else hidden
