"""Sharded checkpoint to one PEFT adapter, or to one Hugging Face model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from hyperpod_ft import publish
from hyperpod_ft.checkpoint import lora, model_directory
from hyperpod_ft.checkpoint.layout import LogicalTensor
from hyperpod_ft.checkpoint.progress import Progress
from hyperpod_ft.checkpoint.reading import TORCH_DTYPE, Reader, refuse_nonfinite
from hyperpod_ft.checkpoint.safetensors_file import read_file, read_model
from hyperpod_ft.checkpoint.safetensors_writer import Outgoing, write_file, write_model
from hyperpod_ft.checkpoint.verify import differing, verify_model
from hyperpod_ft.errors import UserError

# PEFT's name of an adapter in a live model, which its files leave out.
_ADAPTER_NAME = ".default.weight"
_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
_BROKEN = "training diverged or the checkpoint is damaged: use an earlier one, or lower training.learning_rate"


@dataclass(frozen=True)
class Consolidated:
    """What was written: number of tensors and their bytes."""

    tensors: int
    nbytes: int


def consolidate_adapter(
    where: Path,
    checkpoint: Sequence[LogicalTensor],
    base: Path,
    config: lora.AdapterConfig,
    target: Path,
    *,
    base_name: str,
    base_revision: str | None,
    dropout: float,
) -> Consolidated:
    """Write a checkpoint's LoRA tensors (PEFT's live names) as the PEFT adapter directory `target`.

    `where` names the checkpoint in errors. Raises UserError when a tensor is no LoRA factor, does not fit the base, is
    missing for a targeted module, or holds NaN or Inf; nothing is published then.
    """
    adapter = [tensor.renamed(_saved_name(where, tensor.name)) for tensor in checkpoint]
    weights = {tensor.name: tensor for tensor in read_model(base)}
    matched = lora.pairs(where, adapter, weights, config.r, model_directory.is_tied(base))
    lora.refuse_gaps(where, matched, weights, config.target_modules)
    adapter.sort(key=lambda tensor: tensor.name)
    nbytes = sum(tensor.nbytes for tensor in adapter)
    with Reader() as reader, publish.new_directory(target) as partial_directory:
        outgoing = [
            Outgoing(tensor.name, tensor.dtype, tensor.shape, partial(_finite, reader, tensor, where))
            for tensor in adapter
        ]
        file = partial_directory / lora.WEIGHTS
        write_file(file, outgoing, Progress("consolidate", nbytes))
        publish.write_json(partial_directory / lora.CONFIG, config.as_peft(base_name, base_revision, dropout))
        _compare(reader, file, adapter)
    return Consolidated(len(adapter), nbytes)


def consolidate_model(
    where: Path, checkpoint: Sequence[LogicalTensor], base: Path, target: Path, max_shard_bytes: int, card: str
) -> Consolidated:
    """Write a checkpoint's full set of parameters as the Hugging Face model directory `target`.

    Names and dtypes are the base's: each tensor is rounded once to the dtype that it has there, and tied weights stay
    one tensor. Raises UserError when names or shapes differ from the base, a value is NaN or Inf, or nothing was
    learned; nothing is published then.
    """
    weights = {tensor.name: tensor for tensor in read_model(base)}
    sources = _match(where, checkpoint, weights, model_directory.is_tied(base))
    form = {name: (tensor.dtype, tensor.shape) for name, tensor in weights.items()}
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    with Reader() as reader, publish.new_directory(target) as partial_directory:
        outgoing = [
            Outgoing(name, dtype, shape, partial(_converted, reader, sources[name], dtype, where))
            for name, (dtype, shape) in form.items()
        ]
        write_model(partial_directory, outgoing, max_shard_bytes, Progress("consolidate", nbytes))
        model_directory.copy_files(base, partial_directory)
        publish.write_text(partial_directory / "README.md", card)
        written = verify_model(partial_directory, form)
        if not differing(written, weights, form):
            raise UserError(f"{where}: nothing was learned: every tensor equals the base's", "check the training log")
    return Consolidated(len(form), nbytes)


def _saved_name(where: Path, live: str) -> str:
    if not live.endswith(_ADAPTER_NAME):
        raise UserError(f"{where}: tensor {live} is no LoRA factor of the adapter `default`", "was it method lora?")
    return live.removesuffix(_ADAPTER_NAME) + ".weight"


def _match(
    where: Path, checkpoint: Sequence[LogicalTensor], base: dict[str, LogicalTensor], tied: bool
) -> dict[str, LogicalTensor]:
    """For each name of the base the tensor to write there."""
    trained = {tensor.name: tensor for tensor in checkpoint}
    if tied:
        # one parameter under two names: a checkpoint may hold either, the base's files too
        either = trained.get(_EMBEDDING) or trained.get(_OUTPUT)
        if either is not None:
            trained |= {name: either for name in (_EMBEDDING, _OUTPUT) if name in base or name in trained}
    sources = {}
    for name, tensor in base.items():
        # buffers that old checkpoints carry, computed anew by every model
        source = tensor if name.endswith("rotary_emb.inv_freq") else trained.get(name)
        if source is None:
            raise UserError(f"{where}: tensor {name} of the base model is missing", "the checkpoint is incomplete")
        if source.shape != tensor.shape:
            raise UserError(
                f"{where}: tensor {name} has shape {list(source.shape)}, the base model's {list(tensor.shape)}",
                "use the base it was trained on",
            )
        sources[name] = source
    unknown = sorted(trained.keys() - base.keys() - ({_OUTPUT, _EMBEDDING} if tied else set()))
    if unknown:
        raise UserError(f"{where}: the base model has no tensor {unknown[0]}", "use the base it was trained on")
    return sources


def _finite(reader: Reader, tensor: LogicalTensor, where: Path) -> Iterator[torch.Tensor]:
    for block in reader.blocks(tensor):
        yield refuse_nonfinite(block, tensor.name, str(where), _BROKEN)


def _converted(reader: Reader, tensor: LogicalTensor, dtype: str, where: Path) -> Iterator[torch.Tensor]:
    for block in _finite(reader, tensor, where):
        yield refuse_nonfinite(block.to(TORCH_DTYPE[dtype]), tensor.name, f"{where} as {dtype}", _BROKEN)


def _compare(reader: Reader, file: Path, expected: Sequence[LogicalTensor]) -> None:
    """The written adapter, read back, is the checkpoint's."""
    written = {tensor.name: tensor for tensor in read_file(file)}
    for tensor in expected:
        if not torch.equal(reader.tensor(written[tensor.name]), reader.tensor(tensor)):
            raise UserError(f"{file}: after writing, tensor {tensor.name} reads back otherwise", "check the volume")
