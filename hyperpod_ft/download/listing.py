"""What a source offers, and which of its files are wanted."""

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
    origin: str = ""  # how the source itself calls it: an S3 key, a path
    modified: float = 0.0  # when it last changed, in seconds since 1970, where the source tells


@dataclass(frozen=True)
class Listing:
    """A source's files. `commit` is the Hub's for the revision asked for; empty elsewhere."""

    files: tuple[File, ...]
    commit: str = ""

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


Choice = Callable[[Sequence[File]], Sequence[File]]


class FileSource(Protocol):
    """A place files come from. Both methods raise UserError for what a user can mend."""

    def listing(self) -> Listing: ...

    def fetch(self, listing: Listing, directory: Path) -> None:
        """Bring the listed files into `directory`, keeping what an earlier attempt brought."""


# What transformers loads: model.safetensors, or shards with their index. Not `consolidated.safetensors`,
# `model.fp16.safetensors` or `original/`, which hold the same weights once more.
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_FILES = (*BESIDE_WEIGHTS, "model.safetensors.index.json", "README.md")


def model_files(where: str, source: str) -> Choice:
    """Chooses safetensors, configuration, tokenizer and licence; never pickled weights."""

    def choose(files: Sequence[File]) -> Sequence[File]:
        wanted = [file for file in files if _WEIGHTS.fullmatch(file.name) or _matches(file.name, _FILES)]
        if not any(_WEIGHTS.fullmatch(file.name) for file in wanted):
            raise UserError(
                f"{where}: {source} has no safetensors weights (model.safetensors)",
                "choose a model that has, or convert it: pickled weights are never loaded",
            )
        if not any(file.name == "config.json" for file in wanted):
            raise UserError(f"{where}: {source} has no config.json", "choose a transformers model")
        return wanted

    return choose


def dataset_files(where: str, source: str, patterns: Sequence[str]) -> Choice:
    """Chooses what `dataset.files` names; `*` also matches `/`, as in the Hub's own patterns. A source that is
    itself one file is taken whatever its name."""

    def choose(files: Sequence[File]) -> Sequence[File]:
        if len(files) == 1 and source.endswith(f"/{files[0].name}"):
            return files
        wanted = [file for file in files if _matches(file.name, patterns) and not _hidden(file.name)]
        if not wanted:
            there = ", ".join(file.name for file in files[:5]) or "no file"
            raise UserError(
                f"{where}: no file of {source} matches dataset.files ({', '.join(patterns)})",
                f"it holds {there}{', ...' if len(files) > 5 else ''}",
            )
        return wanted

    return choose


def _matches(name: str, patterns: Sequence[str]) -> bool:
    # The first kind of pattern has no directory in it, so that `tokenizer*` does not reach into `tokenizer/`.
    if patterns is _FILES:
        patterns = [pattern for pattern in patterns if pattern.count("/") == name.count("/")]
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _hidden(name: str) -> bool:
    # `..` is not hidden but hostile: refuse_unsafe says so
    return any(part.startswith(".") and part != ".." for part in name.split("/"))


def refuse_unsafe(where: str, files: Sequence[File]) -> None:
    """Raises UserError for a name that would leave the directory: S3 keys may be any text."""
    for file in files:
        parts = file.name.split("/")
        if any(part in ("", ".", "..") for part in parts) or any(ord(character) < 32 for character in file.name):
            raise UserError(f"{where}: the source holds a file named {file.name!r}", "rename or leave it out")
