"""Tensors of every dtype, written by the kit's own writer."""

from pathlib import Path
from typing import Any

import numpy as np

from hyperpod_ft.checkpoint.formats.resumable import resumable_directory
from hyperpod_ft.checkpoint.formats.safetensors_writer import Outgoing, write_model
from hyperpod_ft.checkpoint.tensors.elements import STORED, Stored
from hyperpod_ft.progress import ByteProgress


def outgoing(name: str, dtype: str, values: Stored) -> Outgoing:
    flat = values.reshape(-1)

    def fill(begin: int, end: int, out: Stored) -> None:
        out[:] = flat[begin:end]

    return Outgoing(name, dtype, values.shape, fill)


def some_values(seed: int = 0) -> dict[str, tuple[str, Stored]]:
    """A tensor of every dtype; some larger than a block, some empty, one without dimensions."""
    random = np.random.default_rng(seed)
    shapes = [(3, 5), (0, 4), (), (1,), (1100, 1031), (7, 3, 2)]
    found = {}
    for number, dtype in enumerate(sorted(STORED)):
        shape = shapes[number % len(shapes)]
        content = random.bytes(int(np.prod(shape)) * STORED[dtype].itemsize)
        values = np.frombuffer(content, STORED[dtype] if dtype != "BOOL" else "u1").reshape(shape)
        found[f"layers.{number}.{dtype}"] = (dtype, values % 2 == 1 if dtype == "BOOL" else values)
    return found


def write(target: Path, values: dict[str, tuple[str, Stored]], max_shard_bytes: int = 1 << 40, **identity: Any) -> None:
    tensors = [outgoing(name, dtype, array) for name, (dtype, array) in values.items()]
    with resumable_directory(target, identity) as directory:
        write_model(directory, tensors, max_shard_bytes, ByteProgress("test", 1))
