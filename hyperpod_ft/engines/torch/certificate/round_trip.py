"""Two steps of training of a small model by engine torch, and what becomes of the result."""

from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from hyperpod_ft.config.sections.training import Lora
from hyperpod_ft.engines.certificate.result import check_gradients, check_result, inputs
from hyperpod_ft.engines.certificate.task import small_task
from hyperpod_ft.engines.ranks import Ranks
from hyperpod_ft.engines.torch.loop import training_loop
from hyperpod_ft.engines.torch.model import attention


def check_round_trip(base: Path, lora: Lora | None, directory: Path, *, packed: bool) -> None:
    """Train the small model `base` in `directory`: adapters, or with `lora` None all weights; then load the result.

    `packed`: documents share rows. Raises UserError when an adapter gets no gradient, or what transformers or PEFT load
    is not what was trained.
    """
    task = small_task(base, lora, directory / "run", packed=packed)
    with training_loop(task, Ranks(0, 1, 0, dist.HashStore())) as loop:
        model = loop.model.module
        start = {name: value.detach().clone() for name, value in model.named_parameters() if value.requires_grad}
        before = _logits(model, packed=packed)
        trained = loop.run_to_end()
        if lora:
            check_gradients(start, model)
        after = _logits(model, packed=packed)
    check_result(base, trained.checkpoint, directory, before, after, adapters=lora is not None)


@torch.no_grad()
def _logits(model: PreTrainedModel, *, packed: bool) -> torch.Tensor:
    """Of a document alone, [length, words], by the engine's model."""
    given = inputs()
    mask = {"attention_mask": attention.document_bounds(given["position_ids"])} if packed else {}
    logits: torch.Tensor = type(model).forward(model, **given, use_cache=False, **mask).logits[0]
    return logits.clone()
