"""Turns a sharded checkpoint into PEFT adapters, or into one Hugging Face model, once its bytes are checked."""

import zlib
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

from hyperpod_ft import __version__, publish
from hyperpod_ft.checkpoint.adapters import lora, lora_config, origin
from hyperpod_ft.checkpoint.formats import model_directory, torch_file
from hyperpod_ft.checkpoint.formats.resumable import resumable_directory
from hyperpod_ft.checkpoint.formats.safetensors_file import read_model
from hyperpod_ft.checkpoint.formats.safetensors_writer import (
    MAX_SHARD_BYTES,
    Outgoing,
    WrittenFiles,
    write_files,
    write_model,
)
from hyperpod_ft.checkpoint.formats.torch_file import Archive, ZipRecord
from hyperpod_ft.checkpoint.sharded.sharded import ShardedAdapter, ShardedCheckpoint, open_checkpoint
from hyperpod_ft.checkpoint.tensors import direct, reading
from hyperpod_ft.checkpoint.tensors.blocks import THREADS, for_each
from hyperpod_ft.checkpoint.tensors.direct import BLOCK_BYTES
from hyperpod_ft.checkpoint.tensors.elements import ARITHMETIC, Stored, refuse_nonfinite
from hyperpod_ft.checkpoint.tensors.logical_tensor import (
    DTYPE_OF_TORCH_NAME,
    FLOATING,
    TORCH_NAME_OF_DTYPE,
    LogicalTensor,
)
from hyperpod_ft.checkpoint.tensors.reading import refuse_divergence, same_values
from hyperpod_ft.digests import text_sha256
from hyperpod_ft.errors import UserError
from hyperpod_ft.progress import ByteProgress

# PEFT writes this adapter to the top directory, and each other to its own (PeftModel.save_pretrained).
_DEFAULT_ADAPTER = "default"
# In old files: buffers that every model computes again, such as GPT-2's masks; and a bias of T5, which none has.
_UNUSED = (
    *("rotary_emb.inv_freq", "EncDecAttention.relative_attention_bias.weight"),
    *(f".{attention}.{mask}" for attention in ("attn", "attention") for mask in ("bias", "masked_bias")),
)


def consolidate_checkpoint(
    path: Path,
    target: Path,
    *,
    base: Path | None = None,
    dtype: str | None = None,
    max_shard_bytes: int | None = None,
) -> tuple[ShardedCheckpoint, WrittenFiles]:
    """Write the adapters or the model of the checkpoint at `path`. Returns what was found and what was written.

    `dtype` and `max_shard_bytes` apply to models only; None: the defaults of `consolidate_model`. Raises UserError as
    `open_checkpoint`, `consolidate_adapters` and `consolidate_model` do.
    """
    checkpoint = open_checkpoint(path)
    if not checkpoint.adapters:
        shard_bytes = max_shard_bytes or MAX_SHARD_BYTES
        model = consolidate_model(checkpoint, target, base=base, dtype=dtype or "base", max_shard_bytes=shard_bytes)
        return checkpoint, model
    if dtype is not None or max_shard_bytes is not None:
        option = "--dtype" if dtype is not None else "--max-shard-size"
        raise UserError(
            f"{option}: applies to models, {path} has an adapter, which is written as stored", "leave the option out"
        )
    return checkpoint, consolidate_adapters(checkpoint, target, base=base)


def consolidate_adapters(
    checkpoint: ShardedCheckpoint, target: Path, *, base: Path | None = None, chat_template: str | None = None
) -> WrittenFiles:
    """Write a checkpoint's adapters as PEFT directories: a single one, or the one named `default`, is `target` itself.

    If `base`, the base model's directory, is given, every factor must fit it. `chat_template` is written beside the
    adapter, for the merge. Raises UserError when a factor does not fit, a replica differs between ranks, or a value is
    NaN or Inf; nothing is published then.
    """
    where = checkpoint.directory
    metadata = {}
    if base is not None:
        check_fit(checkpoint, base)
        metadata = origin.of_adapter(read_model(base))
    tensors = checkpoint.tensors
    refuse_damage(tensors, checkpoint.archives)
    refuse_divergence(tensors, where)
    with resumable_directory(
        target, _identity(tensors) | {"template": chat_template, "metadata": metadata}
    ) as directory:
        files: dict[str, Sequence[Outgoing]] = {}
        for adapter in checkpoint.adapters:
            below = _place(adapter, alone=len(checkpoint.adapters) == 1)
            (directory / below).mkdir(exist_ok=True)
            publish.write_json(directory / below / lora_config.CONFIG, adapter.config)
            named = sorted(adapter.tensors, key=lambda tensor: tensor.name)
            files[str(Path(below, lora_config.WEIGHTS))] = [
                checked_copy(tensor, tensor.dtype, where) for tensor in named
            ]
        with ByteProgress("consolidate", sum(tensor.nbytes for tensor in tensors)) as progress:
            written = write_files(directory, files, progress, metadata)
        if chat_template is not None:
            model_directory.set_chat_template(directory, chat_template)
    return written


def consolidate_model(
    checkpoint: ShardedCheckpoint,
    target: Path,
    *,
    base: Path | None = None,
    dtype: str = "base",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    card: str | None = None,
    chat_template: str | None = None,
    stops: Sequence[int] = (),
) -> WrittenFiles:
    """Write a checkpoint's full set of parameters as the Hugging Face model directory `target`.

    If `base`, the base model's directory, is given, names and shapes must match it, and configuration, tokenizer and
    license come from it; otherwise from the checkpoint, if it has them. `dtype`: torch's name of the floating dtype to
    write, or `base`: each tensor's own in the base model, or without a base as stored. Each value is rounded once;
    tied weights stay one tensor. `chat_template` replaces the base's; `stops`: ids that end an answer, too.

    Raises UserError when names or shapes differ from the base, a replica differs between ranks, a value is NaN or Inf,
    or nothing was learned; nothing is published then.
    """
    where = checkpoint.directory
    files_from = base or checkpoint.files
    if files_from is None:
        raise UserError(f"{where}: has no config.json", "give the base model with --base")
    tensors: Mapping[str, LogicalTensor] = {tensor.name: tensor for tensor in checkpoint.model}
    written_as = {name: tensor.dtype for name, tensor in tensors.items()}
    weights = {tensor.name: tensor for tensor in read_model(base)} if base else {}
    if base is not None:
        tensors = _match(checkpoint, tensors, weights, _is_tied(base, weights))
        written_as = {name: weights[name].dtype for name in tensors}
    if dtype != "base":
        written_as = {
            name: DTYPE_OF_TORCH_NAME[dtype] if stored in ARITHMETIC else stored for name, stored in written_as.items()
        }
    identity = _identity(tensors.values()) | {"dtypes": written_as, "shard": max_shard_bytes, "template": chat_template}
    identity |= {"stops": sorted(stops)}
    refuse_damage(checkpoint.model, checkpoint.archives)
    refuse_divergence(checkpoint.model, where)
    # the comparison usually ends within the first tensor
    if weights and all(same_values(tensor, weights[name]) for name, tensor in tensors.items()):
        raise UserError(f"{where}: nothing was learned: every tensor equals the base's", "check the training log")
    with resumable_directory(target, identity) as directory:
        outgoing = [checked_copy(tensor, written_as[name], where) for name, tensor in tensors.items()]
        with ByteProgress("consolidate", sum(tensor.nbytes for tensor in outgoing)) as progress:
            written = write_model(directory, outgoing, max_shard_bytes, progress)
        _copy_other_files(directory, files_from, set(written_as.values()), card)
        model_directory.add_stop_ids(directory, stops)
        if chat_template is not None:
            model_directory.set_chat_template(directory, chat_template)
    return written


def check_fit(checkpoint: ShardedCheckpoint, base: Path) -> None:
    """Raise UserError unless what is in the checkpoint fits the base model, by names and shapes; reads no values."""
    weights = {tensor.name: tensor for tensor in read_model(base)}
    is_tied = _is_tied(base, weights)
    config = model_directory.read_config(base)
    adaptable = model_directory.without_predictors(config, weights)
    model_type = str(model_directory.of_language_model(config).get("model_type"))
    for adapter in checkpoint.adapters:
        lora.check_fit(checkpoint.directory, adapter.config, adapter.tensors, adaptable, is_tied, model_type)
    if not checkpoint.adapters:
        _match(checkpoint, {tensor.name: tensor for tensor in checkpoint.model}, weights, is_tied)


def _is_tied(base: Path, weights: Mapping[str, LogicalTensor]) -> bool:
    return model_directory.is_tied(model_directory.read_config(base), weights)


def _place(adapter: ShardedAdapter, *, alone: bool) -> str:
    return "" if alone or adapter.name == _DEFAULT_ADAPTER else adapter.name


def _identity(tensors: Collection[LogicalTensor]) -> dict[str, Any]:
    """Everything that decides what is written from these tensors: their description, and the state of their files."""
    files = {piece.file for tensor in tensors for piece in tensor.stored}
    states = sorted((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    description = repr((states, sorted(tensors, key=lambda tensor: tensor.name)))
    return {"kit": __version__, "tensors": text_sha256(description)}


def _match(
    checkpoint: ShardedCheckpoint,
    trained: Mapping[str, LogicalTensor],
    base: Mapping[str, LogicalTensor],
    is_tied: bool,
) -> dict[str, LogicalTensor]:
    """The tensor to write for each name of the base, in the base's order."""
    where = checkpoint.directory
    both = (
        {model_directory.OUTPUT, model_directory.embedding(base) or model_directory.embedding(trained) or ""}
        if is_tied
        else set()
    )
    if either := next((trained[name] for name in sorted(both, reverse=True) if name in trained), None):
        # one parameter under two names: the checkpoint and the base may each have either
        trained = {**trained, **{name: either.renamed(name) for name in both if name in base or name in trained}}
    if shared := trained.get(model_directory.SHARED):
        trained = {**trained, **{name: shared.renamed(name) for name in model_directory.SHARED_ALIASES if name in base}}
    sources = {}
    for name, tensor in base.items():
        source = trained.get(name) or (tensor if name in checkpoint.left or name.endswith(_UNUSED) else None)
        if source is None:
            raise UserError(
                f"{where}: tensor {name} of the base model is missing",
                "the checkpoint is incomplete: use an earlier one",
            )
        if source.shape != tensor.shape:
            raise UserError(
                f"{where}: tensor {name} has shape {list(source.shape)}, in the base model {list(tensor.shape)}",
                "use the base that it was trained from",
            )
        sources[name] = source
    unknown = sorted(trained.keys() - base.keys() - both)
    if unknown:
        raise UserError(f"{where}: the base model has no tensor {unknown[0]}", "use the base that it was trained from")
    return sources


def _copy_other_files(directory: Path, source: Path, dtypes: set[str], card: str | None) -> None:
    model_directory.copy_files(source, directory)
    floating = dtypes & FLOATING
    if len(floating) == 1:
        model_directory.set_dtype(directory, TORCH_NAME_OF_DTYPE[floating.pop()])
    if card is not None:
        publish.write_text(directory / "README.md", card)


_DIVERGED = "training diverged or the checkpoint is damaged: use an earlier checkpoint, or lower training.learning_rate"
_NARROWED = f"use a dtype with a wider range, such as bfloat16; if that fails too, {_DIVERGED}"


def checked_copy(tensor: LogicalTensor, dtype: str, where: Path) -> Outgoing:
    """The tensor as `dtype`, rounded once. Writing it raises UserError at a NaN or an infinity."""
    if tensor.dtype != dtype and not {tensor.dtype, dtype} <= ARITHMETIC:
        raise UserError(
            f"{where}: tensor {tensor.name} is {tensor.dtype}, which cannot be converted to {dtype}",
            "leave --dtype out",
        )
    rounded, remedy = (where, _DIVERGED) if tensor.dtype == dtype else (f"{where} as {dtype}", _NARROWED)

    def fill(begin: int, end: int, out: Stored) -> None:
        reading.fill_as(tensor, dtype, begin, end, out)
        refuse_nonfinite(out, dtype, tensor.name, str(rounded), remedy)

    return Outgoing(tensor.name, dtype, tensor.shape, fill)


def refuse_damage(tensors: Iterable[LogicalTensor], archives: Iterable[Archive]) -> None:
    """Raise UserError when a record that holds part of a tensor does not have the CRC-32 that torch.save recorded.

    torch.load does not check it: a flipped byte becomes a wrong weight.

    `archives`: where the tensors are stored.
    """
    needed = list(_needed(tensors, archives))
    with (
        ByteProgress("check", sum(record.size for _, record in needed)) as progress,
        ThreadPoolExecutor(THREADS, "integrity") as pool,
    ):
        for_each(pool, range(len(needed)), lambda index: _check(*needed[index], progress))


def _needed(tensors: Iterable[LogicalTensor], archives: Iterable[Archive]) -> Iterator[tuple[Path, ZipRecord]]:
    """The records of the archives that hold parts of tensors."""
    wanted = sorted({(str(piece.file), piece.offset) for tensor in tensors for piece in tensor.stored})
    offsets = {file: [offset for _, offset in group] for file, group in groupby(wanted, key=lambda place: place[0])}
    for archive in archives:
        inside = offsets.get(str(archive.file), [])
        for record in torch_file.records(archive):
            index = bisect_left(inside, record.offset)
            if index < len(inside) and inside[index] < record.offset + record.size:
                yield archive.file, record


def _check(file: Path, record: ZipRecord, progress: ByteProgress) -> None:
    found = 0
    end = record.offset + record.size
    for begin in range(record.offset, end, BLOCK_BYTES):
        block = direct.buffer("check")[: min(BLOCK_BYTES, end - begin)]
        direct.read(file, begin, block)
        found = zlib.crc32(block.data, found)
        progress.add(block.size)
    if found != record.crc32:
        raise UserError(
            f"{file}: is damaged: bytes {record.offset} to {end} do not match the checksum that was saved with them",
            "restore the file, or use an earlier checkpoint",
        )
