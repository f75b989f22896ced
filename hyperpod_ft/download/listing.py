"""The files of a source, and which of them to fetch."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol

from hyperpod_ft.checkpoint.adapters.lora_config import CONFIG, WEIGHTS
from hyperpod_ft.checkpoint.formats.checksums import CHECKSUMS
from hyperpod_ft.checkpoint.formats.model_directory import BESIDE_WEIGHTS
from hyperpod_ft.config.sections.inputs import Dataset
from hyperpod_ft.data import source_files
from hyperpod_ft.digests import text_sha256
from hyperpod_ft.errors import UserError
from hyperpod_ft.progress import count


@dataclass(frozen=True)
class File:
    """One file of a source: its name relative to the source, and its size in bytes."""

    name: str
    size: int
    origin: str = ""  # the path of a local file
    etag: str = ""  # of an S3 object: changes with its content


@dataclass(frozen=True)
class Listing:
    """A source's files. `commit` is that of the requested revision on the Hub; empty for other sources."""

    files: tuple[File, ...]
    commit: str = ""

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def only(self, name: str) -> "Listing":
        """The file of this name alone, if it is there."""
        return Listing(tuple(file for file in self.files if file.name == name), self.commit)

    @property
    def content(self) -> str:
        """A digest of names, sizes and ETags of S3's objects; empty for other sources, whose revision says as much."""
        lines = sorted(f"{file.name}\0{file.size}\0{file.etag}" for file in self.files if file.etag)
        return text_sha256("\n".join(lines)) if lines else ""


Choice = Callable[[Sequence[File]], Sequence[File]]


class FileSource(Protocol):
    """A place to fetch files from. Both methods raise UserError for what a user can correct."""

    def listing(self) -> Listing: ...

    def fetch(self, listing: Listing, directory: Path) -> None:
        """Fetch the listed files into `directory`, and keep those of an earlier attempt."""


# The files that transformers loads: model.safetensors, or shards with their index, which DeepSeek-V3 and Qwen3.5 name
# in their own ways. Not `consolidated.safetensors`, `model.fp16.safetensors` or `original/`: the same weights.
_WEIGHTS = re.compile(r"model(\.safetensors)?-\d{5,6}-of-\d{5,6}(\.safetensors)?|model\.safetensors")
_LISTED = 10
_OF_ADAPTER = (CONFIG, WEIGHTS, CHECKSUMS, "README.md")
_FILES = (*BESIDE_WEIGHTS, "model.safetensors.index.json", "README.md")


def model_files(where: str, source: str) -> Choice:
    """Chooses safetensors, configuration, tokenizer and license; never pickled weights."""

    def choose(files: Sequence[File]) -> Sequence[File]:
        wanted = [file for file in files if _WEIGHTS.fullmatch(file.name) or _beside(file.name)]
        if not any(_WEIGHTS.fullmatch(file.name) for file in wanted):
            raise UserError(
                f"{where}: {source} has no safetensors weights (model.safetensors)",
                "choose a model that has them, or convert it: pickled weights are never loaded",
            )
        if not any(file.name == "config.json" for file in wanted):
            raise UserError(f"{where}: {source} has no config.json", "choose a transformers model")
        return wanted

    return choose


def adapter_files(where: str, source: str) -> Choice:
    """Chooses an adapter's configuration, safetensors and license; never pickled weights."""

    def choose(files: Sequence[File]) -> Sequence[File]:
        names = {file.name for file in files}
        for needed in (CONFIG, WEIGHTS):
            if needed not in names:
                raise UserError(
                    f"{where}: {source} has no {needed}",
                    "choose a LoRA adapter that PEFT has saved as safetensors: pickled weights are never loaded",
                )
        return [file for file in files if file.name in _OF_ADAPTER or fnmatchcase(file.name, "LICENSE*")]

    return choose


def _beside(name: str) -> bool:
    # at a pattern's own depth only, so that `tokenizer*` does not match files in `tokenizer/`
    return any(fnmatchcase(name, pattern) and pattern.count("/") == name.count("/") for pattern in _FILES)


def dataset_files(dataset: Dataset) -> Choice:
    """Chooses the files that `dataset.files` and `dataset.split` name, and prints which are of other splits."""

    def choose(files: Sequence[File]) -> Sequence[File]:
        names = [file.name for file in files]
        wanted = source_files.chosen(names, dataset.source, dataset.files, dataset.split)
        others = set(source_files.chosen(names, dataset.source, dataset.files, source_files.ALL)).difference(wanted)
        if others:
            listed = ", ".join(sorted(others)[:_LISTED]) + (", ..." if len(others) > _LISTED else "")
            print(f"dataset: split {dataset.split_name}: {count(len(wanted), 'file')}; not of it: {listed}", flush=True)
        return [file for file in files if file.name in wanted]

    return choose


def refuse_unsafe(where: str, files: Sequence[File]) -> None:
    """Raises UserError for a name that would be outside the directory: S3 keys may be any text."""
    for file in files:
        parts = file.name.split("/")
        if any(part in ("", ".", "..") for part in parts) or any(ord(character) < 32 for character in file.name):
            raise UserError(f"{where}: the source has a file named {file.name!r}", "rename or remove it")
