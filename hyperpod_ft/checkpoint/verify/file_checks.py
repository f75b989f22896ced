"""Checks of a model or adapter directory's headers, index and configuration, without reading tensor data."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from hyperpod_ft.checkpoint.adapters.lora_config import WEIGHTS
from hyperpod_ft.checkpoint.formats.safetensors_file import INDEX, SINGLE, Index, read_file, read_index, read_model
from hyperpod_ft.checkpoint.tensors.logical_tensor import LogicalTensor
from hyperpod_ft.checkpoint.verify import config_checks
from hyperpod_ft.errors import UserError
from hyperpod_ft.progress import count

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Contents:
    """The contents of a Hugging Face model or a PEFT adapter. `findings`: one line per fault."""

    files: Mapping[str, Sequence[LogicalTensor]]  # the weight files with a valid header
    is_whole: bool  # whether all files are valid and present
    findings: tuple[str, ...]

    @property
    def tensors(self) -> dict[str, LogicalTensor]:
        return {tensor.name: tensor for tensors in self.files.values() for tensor in tensors}


def read_tensors(directory: Path, *, is_adapter: bool) -> dict[str, LogicalTensor]:
    """The tensors of an adapter, or of a model. Raises UserError when a file is missing or damaged."""
    tensors = read_file(directory / WEIGHTS) if is_adapter else read_model(directory)
    return {tensor.name: tensor for tensor in tensors}


def read_contents(directory: Path, *, is_adapter: bool) -> Contents:
    """What is in the directory of an adapter, or of a model."""
    findings: list[str] = []
    shards = [] if is_adapter else _shards(directory)
    if shards and not any((directory / name).is_file() for name in (SINGLE, INDEX)):
        findings.append(f"{directory / INDEX}: is missing, beside {count(len(shards), 'file')} of a model in several")
    index = None if is_adapter or findings else collect_error(findings, partial(read_index, directory))
    if index is not None:
        names = index.files
    else:
        names = [] if findings else [WEIGHTS if is_adapter else SINGLE]
    read = ((name, collect_error(findings, partial(read_file, directory / name))) for name in names)
    files = {name: tensors for name, tensors in read if tensors is not None}
    is_whole = not findings
    contents = Contents(files, is_whole, ())
    if index is not None:
        findings += (f"{directory / INDEX}: {line}" for line in _index_faults(directory, index, contents))
    if is_whole and not contents.tensors:
        findings.append(f"{directory}: has no tensors")
    elif is_whole:
        faults = config_checks.adapter_faults if is_adapter else config_checks.model_faults
        findings += collect_error(findings, lambda: list(faults(directory, contents.tensors))) or ()
    return Contents(files, is_whole, tuple(findings))


def collect_error(findings: list[str], work: Callable[[], _Result]) -> _Result | None:
    """The result of `work`; None if it raises UserError, which becomes one more finding."""
    try:
        return work()
    except UserError as error:
        findings.append(str(error))
        return None


def _shards(directory: Path) -> list[Path]:
    return sorted(file for file in directory.glob("model*-of-*") if ".safetensors" in file.name)


def _index_faults(directory: Path, index: Index, contents: Contents) -> Iterator[str]:
    yield from index.disagreements(contents.files)
    held = sum(tensor.nbytes for tensors in contents.files.values() for tensor in tensors)
    if contents.is_whole and index.total_size not in (None, held):
        yield f"total_size is {index.total_size}, the tensors have {held} bytes"
    for file in _shards(directory):
        if file.name not in index.files:
            yield f"{file.name} is not in the index"
    if (directory / SINGLE).is_file() and SINGLE not in index.files:
        # transformers then loads the single file, others the shards
        yield f"{SINGLE} exists as well: programs differ in which of the two they load"
