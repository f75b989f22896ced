"""The merge of a tiny base model and an adapter, and ways to spoil them."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from hyperpod_ft.checkpoint.adapters.lora_config import AdapterConfig
from hyperpod_ft.checkpoint.merge.merge import Merged, WeightedAdapter, merge
from hyperpod_ft.errors import UserError
from tests.unit import tiny_checkpoints
from tests.unit.tiny_checkpoints import ADAPTER

PREFIX = "base_model.model."
Q_PROJ = "model.layers.0.self_attn.q_proj"


def make(
    tmp_path: Path, config: AdapterConfig = ADAPTER, dtype: torch.dtype = torch.float32, **base: object
) -> PeftModel:
    """`base/` and `adapter/` below tmp_path, both written by their own libraries."""
    tiny_checkpoints.base_model(tmp_path / "base", dtype, **base)  # type: ignore[arg-type]
    model = tiny_checkpoints.peft_model(tmp_path / "base", config)
    model.save_pretrained(tmp_path / "adapter")
    return model


def run(tmp_path: Path, target: str = "merged", **options: object) -> Merged:
    return merge(tmp_path / "base", [WeightedAdapter(tmp_path / "adapter")], tmp_path / target, **options)  # type: ignore[arg-type]


def files(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def edit_config(tmp_path: Path, part: str = "adapter/adapter_config.json", **values: object) -> None:
    file = tmp_path / part
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def edit_weights(tmp_path: Path, **values: torch.Tensor | None) -> None:
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    kept = {name: value for name, value in (load_file(file) | values).items() if value is not None}
    save_file(kept, file)


def refuse(tmp_path: Path, message: str, **options: object) -> None:
    """The merge ends in one line, and leaves nothing."""
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(UserError, match=message) as refused:
        run(tmp_path, **options)
    assert "\n" not in str(refused.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
