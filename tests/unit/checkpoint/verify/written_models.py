"""Small models and adapters for `verify`, and ways to damage their files."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from hyperpod_ft.checkpoint.formats.resumable import resumable_directory
from hyperpod_ft.checkpoint.formats.safetensors_writer import Outgoing, write_model
from hyperpod_ft.checkpoint.tensors.elements import STORED
from hyperpod_ft.progress import ByteProgress

INDEX = "model.safetensors.index.json"
Arrays = Mapping[str, NDArray[Any]]


def arrays(layers: int = 3) -> dict[str, NDArray[Any]]:
    """The tensors of a language model of 24 tokens and width 16, float32."""
    random = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (24, 16), "lm_head.weight": (24, 16), "model.norm.weight": (16,)}
    shapes |= {f"model.layers.{layer}.mlp.up_proj.weight": (40, 16) for layer in range(layers)}
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def write(
    directory: Path, tensors: Arrays, *, max_shard_bytes: int = 4000, stored_as: str = "F32", **config: Any
) -> Path:
    """With the kit's own writer, which records checksums. `stored_as`: how the arrays' bits are to be read."""

    def fill(array: NDArray[Any], begin: int, end: int, out: NDArray[Any]) -> None:
        out[:] = array.reshape(-1)[begin:end].view(STORED[stored_as])

    config = {"vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 3, "dtype": "float32"} | config
    with resumable_directory(directory, {}) as partial:
        outgoing = [
            Outgoing(name, stored_as, array.shape, lambda b, e, out, array=array: fill(array, b, e, out))  # type: ignore[misc]
            for name, array in tensors.items()
        ]
        with ByteProgress("write", 0) as progress:
            write_model(partial, outgoing, max_shard_bytes, progress)
        (partial / "config.json").write_text(json.dumps(config))
    return directory


def shard(directory: Path, number: int = 0) -> Path:
    return sorted(directory.glob("*.safetensors"))[number]


def header(file: Path) -> tuple[dict[str, Any], bytes]:
    content = file.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def put(file: Path, head: dict[str, Any] | bytes, data: bytes) -> None:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def change_json(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def adapter(directory: Path, **config: Any) -> Path:
    directory.mkdir()
    prefix = "base_model.model.model.layers.0.mlp.up_proj.lora_"
    save_file(
        {f"{prefix}A.weight": torch.ones(4, 16), f"{prefix}B.weight": torch.ones(40, 4)},
        directory / "adapter_model.safetensors",
    )
    values = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["up_proj"]} | config
    (directory / "adapter_config.json").write_text(json.dumps(values))
    return directory
