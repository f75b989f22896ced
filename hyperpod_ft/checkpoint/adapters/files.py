"""An adapter's directory as PEFT writes it, read once completely before it is used."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hyperpod_ft.checkpoint.adapters.lora_config import CONFIG, WEIGHTS, AdapterConfig, read_config
from hyperpod_ft.checkpoint.formats import checksums
from hyperpod_ft.checkpoint.formats.checksums import CHECKSUMS
from hyperpod_ft.checkpoint.formats.safetensors_file import read_file
from hyperpod_ft.checkpoint.tensors.blocks import Scanner
from hyperpod_ft.checkpoint.tensors.elements import Stored, nonfinite
from hyperpod_ft.checkpoint.tensors.logical_tensor import LogicalTensor
from hyperpod_ft.errors import UserError
from hyperpod_ft.progress import ByteProgress

_PICKLE = "adapter_model.bin"


@dataclass(frozen=True)
class AdapterFiles:
    """`digest`: of the weights, XXH3 (128 bits) as hex. `zero`: names of tensors whose values are all zero."""

    directory: Path
    config: AdapterConfig
    tensors: tuple[LogicalTensor, ...]
    digest: str
    zero: frozenset[str]


def read_adapter(directory: Path) -> AdapterFiles:
    """Raises UserError when it is not a LoRA adapter that can be merged, differs from its recorded checksum, or holds
    NaN or Inf.
    """
    file = directory / WEIGHTS
    if not file.is_file() and (directory / _PICKLE).is_file():
        raise UserError(
            f"{directory / _PICKLE}: is a pickle, which can run any code when it is loaded",
            f"if you trust it, load it with PEFT and save it again with save_pretrained, which writes {WEIGHTS}",
        )
    config = read_config(directory / CONFIG)
    if config.unsupported:
        raise UserError(
            f"{directory / CONFIG}: merge does not handle: {', '.join(config.unsupported)}", "merge it with PEFT"
        )
    tensors = tuple(read_file(file))
    kinds: dict[str, str] = {}  # `NaN` or `Inf`, by tensor
    nonzero: set[str] = set()

    def inspect(tensor: LogicalTensor, _: int, stored: Stored) -> None:  # called by several threads
        if kind := nonfinite(stored, tensor.dtype):
            kinds[tensor.name] = kind
        if tensor.name not in nonzero and np.any(stored):
            nonzero.add(tensor.name)

    with ByteProgress("adapter", file.stat().st_size) as progress, Scanner(progress) as scanner:
        digest = scanner.scan(file, tensors, inspect)
    if checksums.recorded(directory).get(WEIGHTS, digest) != digest:
        raise UserError(
            f"{file}: is damaged: its checksum differs from {CHECKSUMS}", "restore the file, or save the adapter again"
        )
    for name, kind in sorted(kinds.items()):
        raise UserError(f"{file}: tensor {name} holds {kind}", "training diverged: use an earlier checkpoint")
    zero = frozenset(tensor.name for tensor in tensors) - nonzero
    return AdapterFiles(directory, config, tensors, digest, zero)
