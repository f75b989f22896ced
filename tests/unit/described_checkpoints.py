"""The checkpoint.json of engine torch beside files that a test has written, or that are on another node."""

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from hyperpod_ft.checkpoint.sharded import description
from hyperpod_ft.checkpoint.sharded.description import BaseModelSource, Description, LoraDescription, RankDegrees


def describe(
    checkpoint: Path,
    content: Mapping[str, bytes] | None = None,
    *,
    base: str = "org/model",
    step: int = 1,
    fingerprint: str = "0" * 16,
    lora: LoraDescription | None = None,
    ranks: int = 1,
    progress: Mapping[str, Any] = {},
) -> Path:
    """Describe a checkpoint; `content`: of its files, by default those that are there."""
    if content is None:
        content = {file.name: file.read_bytes() for file in checkpoint.iterdir() if file.name != description.NAME}
    described = Description(
        engine="torch",
        step=step,
        fingerprint=fingerprint,
        method="lora" if lora else "full",
        base_model=BaseModelSource(source=base, revision=None),
        lora=lora,
        degrees=RankDegrees(world_size=ranks, data_parallel=ranks, pipeline_parallel=1, tensor_parallel=1),
        progress=dict(progress),
        files={name: len(data) for name, data in content.items()},
        sha256={name: sha256(data).hexdigest() for name, data in content.items()},
    )
    description.write(checkpoint, described)
    return checkpoint
