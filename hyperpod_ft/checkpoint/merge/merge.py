"""Merges LoRA adapters into their base model, streaming: memory does not grow with the model."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from threadpoolctl import threadpool_limits

from hyperpod_ft import __version__, publish
from hyperpod_ft.checkpoint.adapters import origin
from hyperpod_ft.checkpoint.adapters.files import AdapterFiles, read_adapter
from hyperpod_ft.checkpoint.adapters.live_names import modules
from hyperpod_ft.checkpoint.adapters.lora import AdapterEffect, classify_tensors
from hyperpod_ft.checkpoint.adapters.lora_config import CONFIG
from hyperpod_ft.checkpoint.formats import model_directory
from hyperpod_ft.checkpoint.formats.model_directory import TOKENIZER
from hyperpod_ft.checkpoint.formats.resumable import resumable_directory
from hyperpod_ft.checkpoint.formats.safetensors_file import read_model
from hyperpod_ft.checkpoint.formats.safetensors_writer import MAX_SHARD_BYTES, Outgoing, write_model
from hyperpod_ft.checkpoint.kinds import refuse_overlap
from hyperpod_ft.checkpoint.merge.plan import Base, MergePlan, make_plan, read_base, without_unchanged
from hyperpod_ft.checkpoint.tensors.elements import ARITHMETIC
from hyperpod_ft.checkpoint.tensors.logical_tensor import DTYPE_OF_TORCH_NAME
from hyperpod_ft.checkpoint.tensors.reading import same_values
from hyperpod_ft.digests import file_sha256, text_sha256
from hyperpod_ft.errors import UserError
from hyperpod_ft.progress import ByteProgress


@dataclass(frozen=True)
class WeightedAdapter:
    """A PEFT adapter and the factor of its updates."""

    directory: Path
    weight: float = 1.0


@dataclass(frozen=True)
class Merged:
    """The result. `merged`: tensors that adapters change; `lost_in_rounding`: those of them whose update was.

    `unchecked`: adapters that do not say which model they were trained on.
    """

    tensors: int
    merged: int
    lost_in_rounding: int
    adapters: int
    unchecked: int
    nbytes: int
    shards: int
    seconds: float


def merge(
    base: Path,
    adapters: Sequence[WeightedAdapter],
    target: Path,
    *,
    dtype: str = "base",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    card: str | None = None,
    stops: Sequence[int] = (),
) -> Merged:
    """Write base + adapters as the model directory `target`.

    Each targeted weight becomes W + sum of weight * scale * (B @ A), computed in fp32 and rounded once to its dtype;
    DoRA rescales; tensors that an adapter trained whole replace the base's. All others are copied byte for byte, unless
    `dtype` (torch's name, or `base`) selects another dtype. The adapters' chat template, if they have one, replaces the
    base's; `stops`: ids that end an answer, too. `card` becomes README.md; None: a card naming base and adapters.

    A killed merge resumes when it is called again with the same files.

    Raises UserError when an adapter does not fit the base, was trained on another one or merged into it already, is
    damaged, conflicts with another, needs an unsupported operation, or has only zero updates, and when the result is
    not finite. Nothing is published then.
    """
    clock = time.monotonic()
    refuse_overlap(target, [base, *(one.directory for one in adapters)])
    files = [read_adapter(one.directory) for one in adapters]
    _refuse_repeated([one.directory for one in adapters])
    unchecked = sum(not origin.check_base(base, one.directory) for one in adapters)
    metadata = origin.of_merged(base, [one.tensors for one in files])
    model = read_base(base, modules(tensor for one in files for tensor in one.tensors))
    # the writer's threads already use all CPUs; BLAS threads would only compete with them
    with threadpool_limits(1, "blas"):
        classified = [_classified(one, model) for one in files]
        weights = [one.weight for one in adapters]
        plan = make_plan(model, list(zip(classified, weights, strict=True)))
        dtypes = {name: _written_as(model, name, dtype) for name in plan.tensors}
        outgoing = [
            Outgoing(model.written_as(name), dtypes[name], tensor.source.shape, partial(tensor.fill, dtypes[name]))
            for name, tensor in plan.tensors.items()
        ]
        template = _chat_template(files)
        identity = _identity(model, files, weights) | {"dtype": dtype, "shard": max_shard_bytes, "template": template}
        identity |= {"metadata": metadata, "stops": sorted(stops)}
        with resumable_directory(target, identity) as directory:
            with ByteProgress("merge", sum(tensor.nbytes for tensor in outgoing)) as progress:
                written = write_model(directory, outgoing, max_shard_bytes, progress, metadata)
            unchanged = _unchanged(model, plan, directory)
            lost = sum(not plan.tensors[name].is_idle for name in unchanged)
            merged = len(plan.touched) - len(unchanged) + lost
            if lost == merged:
                raise UserError(
                    f"{adapters[0].directory}: nothing was learned: rounding to the weights' dtype loses every update",
                    "train longer or with a higher training.learning_rate, or merge with --dtype float32",
                )
            _copy_other_files(directory, model, files, plan, dtype)
            model_directory.add_stop_ids(directory, stops)
            if template is not None:
                model_directory.set_chat_template(directory, template)
            text = merge_card(base, [(one.directory, one.weight) for one in adapters]) if card is None else card
            publish.write_text(directory / "README.md", text)
    return Merged(
        tensors=written.tensors,
        merged=merged,
        lost_in_rounding=lost,
        adapters=len(adapters),
        unchecked=unchecked,
        nbytes=written.nbytes,
        shards=len(written.files),
        seconds=round(time.monotonic() - clock, 3),
    )


def _refuse_repeated(adapters: Sequence[Path]) -> None:
    for position, directory in enumerate(adapters):
        if any(directory.samefile(earlier) for earlier in adapters[:position]):
            raise UserError(f"{directory}: is given twice", "give it once, with --weight 2")


def _classified(files: AdapterFiles, model: Base) -> AdapterEffect:
    """Raises UserError when the adapter does not fit the base, or cannot change it."""
    adaptable = model_directory.without_predictors(model.config, model.tensors)
    adapter = classify_tensors(
        files.directory,
        files.config,
        files.tensors,
        adaptable,
        conv1d=model.is_conv1d,
        model_type=str(model_directory.of_language_model(model.config).get("model_type")),
    )
    adapter = without_unchanged(adapter, model)
    learned = adapter.replaced or any(
        update.magnitude or not {update.b.name, *([update.a.name] if update.a else [])} & files.zero
        for update in adapter.updates.values()
    )
    if not learned:
        raise UserError(f"{files.directory}: nothing was learned: every lora_B is zero", "check the training log")
    return adapter


def _written_as(model: Base, name: str, dtype: str) -> str:
    own = model.tensors[name].dtype
    return own if dtype == "base" or own not in ARITHMETIC else DTYPE_OF_TORCH_NAME[dtype]


def _identity(model: Base, files: Sequence[AdapterFiles], weights: Sequence[float]) -> dict[str, Any]:
    """Everything in the inputs that determines the output."""
    inputs = {piece.file for tensor in model.stored.values() for piece in tensor.pieces}
    inputs |= {model.directory / model_directory.CONFIG}
    states = [(str(file.absolute()), file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(inputs)]
    adapters = [
        (str(one.directory.absolute()), one.digest, file_sha256(one.directory / CONFIG), weight)
        for one, weight in zip(files, weights, strict=True)
    ]
    return {"kit": __version__, "inputs": text_sha256(json.dumps([states, adapters]))}


def _chat_template(files: Sequence[AdapterFiles]) -> str | None:
    """The adapters' chat template if all share one; otherwise the base model's."""
    found = {model_directory.chat_template(one.directory) for one in files}
    return found.pop() if len(found) == 1 else None


def _unchanged(model: Base, plan: MergePlan, directory: Path) -> list[str]:
    """Those of the tensors that adapters have factors for that equal the base's, in the dtype that was written."""
    written = {tensor.name: tensor for tensor in read_model(directory)}
    return [name for name in plan.touched if same_values(model.tensors[name], written[model.written_as(name)])]


def _copy_other_files(directory: Path, model: Base, files: Sequence[AdapterFiles], plan: MergePlan, dtype: str) -> None:
    model_directory.copy_files(model.directory, directory)
    if "vocab_size" in plan.config:
        # the adapter has tokens that the base's tokenizer lacks
        for one in files:
            model_directory.copy_files(one.directory, directory, TOKENIZER)
    if plan.config:
        model_directory.update_config(directory, plan.config)
    if dtype != "base":
        model_directory.set_dtype(directory, dtype)


def merge_card(base: Path, adapters: Sequence[tuple[Path, float]]) -> str:
    """README.md, with the header for the Hub; `adapters`: directories with their weights."""
    name = base.resolve().name
    header = {"base_model": name, "library_name": "transformers", "tags": ["hyperpod-ft", "lora", "merge"]}
    rows = [("base model", name)]
    rows += [("LoRA adapter", f"{directory.resolve().name}, weight {weight:g}") for directory, weight in adapters]
    rows += [("made by", f"hyperpod-ft {__version__}")]
    table = "\n".join(f"| {key} | {value.replace('|', chr(92) + '|')} |" for key, value in rows)
    return (
        f"---\n{yaml.safe_dump(header, sort_keys=False, allow_unicode=True)}---\n\n# {name}, merged\n\n"
        f"LoRA adapters merged into their base model.\n\n| | |\n|---|---|\n{table}\n"
    )
