"""Small checkpoints as optimum-neuron writes them, opened."""

from pathlib import Path
from typing import Any

import torch

from hyperpod_ft.checkpoint.sharded.sharded import open_checkpoint
from tests.unit import nxd_adapters, nxd_files
from tests.unit.nxd_models import Layout, Lora, Model


def make_model(directory: Path, model: Model | None = None, layout: Layout | None = None) -> Any:
    model, layout = model or Model(), layout or Layout(2, 2)
    return open_checkpoint(nxd_files.save_model(directory / "checkpoint-4", model, layout, model.random()))


def make_adapter(
    directory: Path, model: Model | None = None, layout: Layout | None = None, lora: Lora | None = None
) -> Any:
    model, layout, lora = model or Model(), layout or Layout(2, 2), lora or Lora()
    tensors = nxd_adapters.random_adapter(model, layout, lora, torch.float32)
    saved = nxd_files.save_adapters(directory / "checkpoint-4", model, layout, model.random(), [(lora, tensors)])
    return open_checkpoint(saved)
