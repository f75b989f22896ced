"""Base model plus LoRA adapter: one Hugging Face model, streamed in blocks of rows."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from hyperpod_ft import publish
from hyperpod_ft.checkpoint import lora, model_directory
from hyperpod_ft.checkpoint.layout import DTYPE_OF_TORCH_NAME, FLOATING, LogicalTensor
from hyperpod_ft.checkpoint.progress import Progress
from hyperpod_ft.checkpoint.reading import BLOCK_BYTES, TORCH_DTYPE, Reader, refuse_nonfinite, row_ranges
from hyperpod_ft.checkpoint.safetensors_file import read_file, read_model
from hyperpod_ft.checkpoint.safetensors_writer import Outgoing, write_model
from hyperpod_ft.checkpoint.verify import differing, verify_model
from hyperpod_ft.errors import UserError


@dataclass(frozen=True)
class Merged:
    """What a merge did. `unchanged`: targeted tensors whose update vanished in the rounding."""

    tensors: int
    merged: int
    unchanged: int
    nbytes: int
    shards: int
    max_abs_change: float
    seconds: float


class _Largest:
    """The largest absolute change of any weight so far."""

    def __init__(self) -> None:
        self.value = 0.0

    def see(self, change: torch.Tensor) -> None:
        if change.numel():
            self.value = max(self.value, float(change.abs().max()))


def merge(
    base: Path, adapter: Path, target: Path, *, dtype: str = "base", max_shard_bytes: int = 5_000_000_000, card: str
) -> Merged:
    """Write base + adapter as the model directory `target`.

    Each targeted weight becomes W + scale * (B @ A), computed in fp32 and rounded once to its dtype. Other tensors are
    copied byte for byte, unless `dtype` (torch's name, or `base`) asks for another. `card` becomes README.md.

    Raises UserError when the adapter does not fit, holds what this merge does not do, has only zero updates, or the
    result is not finite; nothing is published then.
    """
    clock = time.monotonic()
    config = lora.read_config(adapter / lora.CONFIG)
    weights = {tensor.name: tensor for tensor in read_model(base)}
    matched = lora.pairs(adapter, read_file(adapter / lora.WEIGHTS), weights, config.r, model_directory.is_tied(base))
    pair_of = {pair.weight: pair for pair in matched}
    form = {name: (_target_dtype(tensor, dtype), tensor.shape) for name, tensor in weights.items()}
    largest = _Largest()
    with Reader() as reader, publish.new_directory(target) as partial_directory:
        _refuse_untrained(reader, adapter, matched)
        outgoing = [
            Outgoing(
                name,
                form[name][0],
                tensor.shape,
                partial(_merged, reader, tensor, pair_of[name], config.scale, form[name][0], largest)
                if name in pair_of
                else partial(_copied, reader, tensor, form[name][0]),
            )
            for name, tensor in weights.items()
        ]
        total = sum(tensor.nbytes for tensor in outgoing)
        written = write_model(partial_directory, outgoing, max_shard_bytes, Progress("merge", total))
        model_directory.copy_files(base, partial_directory)
        if dtype != "base":
            model_directory.set_dtype(partial_directory, dtype)
        publish.write_text(partial_directory / "README.md", card)
        changed = differing(verify_model(partial_directory, form), weights, pair_of)
        if not changed:
            raise UserError(
                f"{adapter}: nothing was learned: every update is lost in the rounding to the weights' dtype",
                "train longer or with a higher training.learning_rate, or set merge.dtype: float32",
            )
    return Merged(
        tensors=written.tensors,
        merged=len(matched),
        unchanged=len(matched) - len(changed),
        nbytes=written.nbytes,
        shards=len(written.files),
        max_abs_change=largest.value,
        seconds=round(time.monotonic() - clock, 3),
    )


def _target_dtype(tensor: LogicalTensor, dtype: str) -> str:
    return tensor.dtype if dtype == "base" or tensor.dtype not in FLOATING else DTYPE_OF_TORCH_NAME[dtype]


def _refuse_untrained(reader: Reader, adapter: Path, matched: list[lora.Pair]) -> None:
    if not any(bool(reader.tensor(pair.b).count_nonzero()) for pair in matched):
        raise UserError(f"{adapter}: nothing was learned: every lora_B is zero", "check the training log")


def _copied(reader: Reader, tensor: LogicalTensor, dtype: str) -> Iterator[torch.Tensor]:
    for block in reader.blocks(tensor):
        yield block.to(TORCH_DTYPE[dtype])


def _merged(
    reader: Reader, weight: LogicalTensor, pair: lora.Pair, scale: float, dtype: str, largest: _Largest
) -> Iterator[torch.Tensor]:
    """W + scale * (B @ A) in blocks of rows.

    The order is PEFT's (peft/tuners/lora/layer.py, get_delta_weight and merge): multiply the factors, then by the
    scale, then add, all in fp32, since PEFT adds an fp32 update to a bf16 weight that way.
    """
    a, b = reader.tensor(pair.a).float(), reader.tensor(pair.b).float()
    for first, last in row_ranges(weight.shape, a.element_size(), BLOCK_BYTES):
        before = reader.rows(weight, first, last)
        after = torch.mm(b[first:last], a).mul_(scale).add_(before.float()).to(TORCH_DTYPE[dtype])
        refuse_nonfinite(
            after, weight.name, f"merged model ({dtype})", "the adapter is broken, or merge.dtype too narrow"
        )
        largest.see(after.float() - before.float())
        yield after
