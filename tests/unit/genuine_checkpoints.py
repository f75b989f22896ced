"""Genuine sharded checkpoints of the Trainium stack: those of tests/data/nxd, whose README says what is in them.

HYPERPOD_FT_NXD_FIXTURES names a directory that has more of them, larger ones for instance.
"""

import json
import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.unit.nxd_models import Layout, Model

DIRECTORY = Path(__file__).resolve().parents[1] / "data" / "nxd"


@dataclass(frozen=True)
class Genuine:
    """One training's checkpoint, as its directory's name says: lora_tp2_pp2_kv8_fuseqkv_noxser."""

    directory: Path

    def __str__(self) -> str:
        return self.directory.name

    @property
    def lora(self) -> bool:
        return self.directory.name.startswith("lora")

    @property
    def diverged(self) -> bool:
        """Whether ranks hold different copies of what should be equal."""
        return "DIVERGED" in self.directory.name

    @property
    def checkpoint(self) -> Path:
        return self.directory / "checkpoint-4"

    @property
    def shards(self) -> Path:
        return self.checkpoint / ("adapter_default/adapter_shards" if self.lora else "shards")

    @property
    def consolidated(self) -> Path:
        """Upstream's consolidation; for LoRA a PEFT adapter."""
        return self.directory / "expected_consolidated"

    @property
    def weights(self) -> Path:
        return self.consolidated / ("adapter_model.safetensors" if self.lora else "model.safetensors")

    @property
    def logits(self) -> Path:
        """Of the sharded model after training: input_ids, trained, and for LoRA base. A pipeline has none."""
        return self.directory / "live_sharded_logits.safetensors"

    @property
    def base(self) -> Path:
        (kv_heads,) = re.findall("_kv([0-9]+)", self.directory.name) or ["4"]
        return self.directory.parent / "base" / f"llama-kv{kv_heads}"

    @cached_property
    def model(self) -> Model:
        config: dict[str, Any] = json.loads((self.base / "config.json").read_text())
        return Model(
            heads=config["num_attention_heads"],
            key_heads=config["num_key_value_heads"],
            head_size=config["head_dim"],
            intermediate=config["intermediate_size"],
            vocabulary=config["vocab_size"],
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
        )

    @property
    def layout(self) -> Layout:
        name = self.directory.name
        degrees = {kind: int(degree) for kind, degree in re.findall("_(tp|pp)([0-9]+)", name)}
        return Layout(degrees["tp"], degrees.get("pp", 1), xser="_noxser" not in name, fuse_qkv="fuseqkv" in name)


def _found() -> list[Genuine]:
    more = os.environ.get("HYPERPOD_FT_NXD_FIXTURES")
    directories = [DIRECTORY, *([Path(more)] if more else [])]
    return [Genuine(path.parent) for directory in directories for path in sorted(directory.glob("*/checkpoint-4"))]


ALL = _found()
LORA = [genuine for genuine in ALL if genuine.lora]
SOUND = [genuine for genuine in ALL if not genuine.diverged]
DIVERGED = [genuine for genuine in ALL if genuine.diverged]


def one(name: str) -> Genuine:
    return Genuine(DIRECTORY / name)
