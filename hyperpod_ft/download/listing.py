"""The files of a source, and which of them to fetch."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol

from hyperpod_ft.checkpoint.formats.model_directory import BESIDE_WEIGHTS
from hyperpod_ft.errors import UserError


@dataclass(frozen=True)
class File:
    """One file of a source: its name relative to the source, and its size in bytes."""

    name: str
    size: int
    origin: str = ""  # the path of a local file


@dataclass(frozen=True)
class Listing:
    """A source's files. `commit` is that of the requested revision on the Hub; empty for other sources."""

    files: tuple[File, ...]
    commit: str = ""

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


Choice = Callable[[Sequence[File]], Sequence[File]]


class FileSource(Protocol):
    """A place to fetch files from. Both methods raise UserError for what a user can correct."""

    def listing(self) -> Listing: ...

    def fetch(self, listing: Listing, directory: Path) -> None:
        """Fetch the listed files into `directory`, and keep those of an earlier attempt."""


# The files that transformers loads: model.safetensors, or shards with their index. Not `consolidated.safetensors`,
# `model.fp16.safetensors` or `original/`, which are copies of the same weights.
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_FILES = (*BESIDE_WEIGHTS, "model.safetensors.index.json", "README.md")


def model_files(where: str, source: str) -> Choice:
    """Chooses safetensors, configuration, tokenizer and license; never pickled weights."""

    def choose(files: Sequence[File]) -> Sequence[File]:
        wanted = [file for file in files if _WEIGHTS.fullmatch(file.name) or _matches(file.name, _FILES)]
        if not any(_WEIGHTS.fullmatch(file.name) for file in wanted):
            raise UserError(
                f"{where}: {source} has no safetensors weights (model.safetensors)",
                "choose a model that has them, or convert it: pickled weights are never loaded",
            )
        if not any(file.name == "config.json" for file in wanted):
            raise UserError(f"{where}: {source} has no config.json", "choose a transformers model")
        return wanted

    return choose


def dataset_files(where: str, source: str, patterns: Sequence[str]) -> Choice:
    """Chooses the files that match `dataset.files`; `*` also matches `/`, as in the Hub's patterns.

    If the source is a single file, its name need not match.
    """

    def choose(files: Sequence[File]) -> Sequence[File]:
        if len(files) == 1 and source.endswith(f"/{files[0].name}"):
            return files
        wanted = [file for file in files if _matches(file.name, patterns) and not _hidden(file.name)]
        if not wanted:
            there = ", ".join(file.name for file in files[:5]) or "no file"
            raise UserError(
                f"{where}: no file of {source} matches dataset.files ({', '.join(patterns)})",
                f"correct it: the source has {there}{', ...' if len(files) > 5 else ''}",
            )
        return wanted

    return choose


def _matches(name: str, patterns: Sequence[str]) -> bool:
    # Model patterns match at their own depth only, so that `tokenizer*` does not match files in `tokenizer/`.
    if patterns is _FILES:
        patterns = [pattern for pattern in patterns if pattern.count("/") == name.count("/")]
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _hidden(name: str) -> bool:
    # `..` is not hidden: refuse_unsafe rejects it
    return any(part.startswith(".") and part != ".." for part in name.split("/"))


def refuse_unsafe(where: str, files: Sequence[File]) -> None:
    """Raises UserError for a name that would be outside the directory: S3 keys may be any text."""
    for file in files:
        parts = file.name.split("/")
        if any(part in ("", ".", "..") for part in parts) or any(ord(character) < 32 for character in file.name):
            raise UserError(f"{where}: the source has a file named {file.name!r}", "rename or remove it")
