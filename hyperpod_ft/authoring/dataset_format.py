"""Which format of section `dataset` a dataset has: from its first rows, or from its name on the Hub."""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

from hyperpod_ft.config.fields import shortened
from hyperpod_ft.config.sections.inputs import Dataset
from hyperpod_ft.data import reading, source_files
from hyperpod_ft.data.columns import UnusedColumns
from hyperpod_ft.data.text import conversation as conversations
from hyperpod_ft.data.text import prompts
from hyperpod_ft.data.text.example import RowError
from hyperpod_ft.digests import names_below
from hyperpod_ft.errors import UserError, printable

_ROWS = 50
_UNREADABLE = (UserError, OSError, ValueError)  # pyarrow's errors are ValueErrors
_LONG = 1000  # characters of a prompt that a run file need not have

# Datasets whose formats are known without a look at them, by Hub id.
_ON_THE_HUB: dict[str, dict[str, Any]] = {
    "databricks/databricks-dolly-15k": {
        "format": "dolly",
        "files": ["databricks-dolly-15k.jsonl"],
        "overlong": "truncate",  # some of its examples exceed max_length: as bad rows, they would stop the run
    },
    "tatsu-lab/alpaca": {"format": "alpaca"},
    "yahma/alpaca-cleaned": {"format": "alpaca", "files": ["alpaca_data_cleaned.json"]},
    "HuggingFaceH4/ultrachat_200k": {"format": "chat", "split": "train_sft"},
    "HuggingFaceH4/ultrafeedback_binarized": {"format": "preference", "split": "train_prefs"},
}
# Fields that make a question and its answer, where no format has these names.
_PAIRS = (
    ("question", "answer"),
    ("query", "response"),
    ("prompt", "response"),
    ("prompt", "answer"),
    ("instruction", "answer"),
    ("input", "output"),
    ("source", "target"),
)
# Fields of a row's prompt.
_PROMPT_FIELDS = {
    "dolly": ("instruction", "context"),
    "alpaca": ("instruction", "input"),
    "prompt-completion": ("prompt",),
    "unpaired-preference": ("prompt",),
}

# Of formats whose completions are text or messages.
_COMPLETIONS = {"preference": ("chosen", "rejected"), "unpaired-preference": ("completion", "label")}


class FormatUnclearError(UserError):
    """Rows whose format must be given."""


@dataclass(frozen=True)
class FoundFormat:
    """Keys of section `dataset`, and how they were found."""

    keys: dict[str, Any]
    how: str
    prompt: Any = None  # the first row's, as section `generate` takes it; None if there is none


def known_on_the_hub(source: str) -> FoundFormat | None:
    """The format of a well-known dataset of the Hub, by its name alone."""
    keys = _ON_THE_HUB.get(source)
    return FoundFormat(keys, "known for this dataset; its rows were not looked at") if keys else None


@dataclass(frozen=True)
class LocalFiles:
    """The files of a dataset that a run would read: `path` itself, or those named below it."""

    path: Path
    names: tuple[str, ...]
    others: tuple[str, ...]  # files that `dataset.split` leaves out

    @classmethod
    def of(cls, path: Path, files: Sequence[str], split: str) -> "LocalFiles":
        """Raises UserError when `dataset.files` and `dataset.split` select no file."""
        below = names_below(path)
        names = source_files.chosen(below, str(path), files, split)
        others = {*source_files.chosen(below, str(path), files, source_files.ALL)}.difference(names)
        return cls(path, tuple(name for name in names if not source_files.is_image(name)), tuple(sorted(others)))

    def format(self) -> FoundFormat:
        """The format of the first rows. Raises UserError when there are no rows, or no format fits them all."""
        rows = list(islice(self._rows(), _ROWS))
        if not rows:
            raise UserError(f"{self.path}: has no rows", "give a JSON Lines, JSON or parquet file")
        found = _recognized(self.path, rows[0].values)
        for row in rows[1:]:
            if _keys(row.values) != found:
                raise FormatUnclearError(
                    f"{self.path}: {row.where}: has other fields than the first row ({_fields(row.values)})",
                    "give the format with --format, and set dataset.max_bad_rows for rows that do not have it",
                )
        counted = "its only row" if len(rows) == 1 else f"its first {len(rows)} rows"
        how = f"recognized from {counted}: {_fields(rows[0].values)}"
        return FoundFormat(found, how, _prompt(found, rows[0].values))

    def unused_columns(self, dataset: Dataset) -> list[str]:
        """What the first rows have that training does not use, as lines of comment."""
        try:
            rows = list(islice(self._rows(), _ROWS))
        except _UNREADABLE:
            return []
        unused, stops = UnusedColumns(dataset), []
        try:
            for row in rows:
                unused.add(row.where, row.values)
            unusable = [(row.where, why) for row in rows if (why := _why_unusable(dataset, row.values))]
            # as stage dataset does: too many, or none that can be used
            if len(unusable) > min(dataset.max_bad_rows, max(len(rows) - 1, 0)):
                raise UserError(
                    f"{len(unusable)} of the first {len(rows)} rows cannot be used: {': '.join(unusable[0])}",
                    "give the format that they have",
                )
        except UserError as error:
            stops = [f"Stage dataset will stop: {error}."]
        listed = printable(", ".join(sorted(unused.names)))
        return [*([f"Columns not used: {listed}."] if listed else []), *stops]

    def image_files(self, *, first_rows_tell: bool) -> list[str] | None:
        """Patterns of `dataset.files` for the images that the rows name; None if no row has an image.

        `first_rows_tell`: if the first rows have none, the others are not read. Raises UserError for a row that names
        an image outside the directory of its file.
        """
        patterns, has_images = set[str](), False
        for number, (where, images) in enumerate(self._images()):
            if first_rows_tell and number == _ROWS and not has_images:
                break
            patterns.update(_pattern(where, image) for image in images)
            has_images = has_images or bool(images)
        return sorted(patterns - {""}) if has_images else None

    def _images(self) -> Iterator[tuple[str, list[Any]]]:
        """Where each row is, and what it gives as its images; the rows up to one that cannot be read."""
        with contextlib.suppress(*_UNREADABLE):
            for row in self._rows():
                yield row.where, _images_of(row.values)

    def count(self, most: int | None) -> int:
        """The raw rows, counted up to `most`, or all; 0 where they cannot be read here."""
        try:
            return sum(1 for _ in islice(self._rows(), most))
        except _UNREADABLE:
            return 0

    def _rows(self) -> Iterator[reading.RawRow]:
        directory = self.path if self.path.is_dir() else self.path.parent
        for name in self.names:
            try:
                for chunk in reading.chunks_of(directory, name):
                    yield from (row for row in reading.read(directory, chunk) if isinstance(row, reading.RawRow))
            except ImportError as error:
                raise FormatUnclearError(
                    f"{name}: reading parquet needs pyarrow, which is not installed here", "pass --format"
                ) from error


def _images_of(row: Mapping[str, Any]) -> list[Any]:
    found: list[Any] = []

    def read(image: Any) -> bytes:
        found.append(image)
        return b""

    with contextlib.suppress(RowError):
        conversations.of_row(row, read)
    return found


def _pattern(where: str, image: Any) -> str:
    """That of the images of its type below the directory of one that a row names; empty for one in the row, or a URL.

    Raises UserError for a path that leads out of the directory of the row's file.
    """
    if isinstance(image, Mapping):
        image = None if image.get("bytes") else image.get("path")
    if not isinstance(image, str) or not source_files.is_image(image) or "://" in image:
        return ""
    beside, path = PurePosixPath(where.rpartition(":")[0]).parent, PurePosixPath(image)
    if path.is_absolute() or ".." in path.parts:
        raise UserError(
            f"{where}: names an image that is not below the directory of this file",
            "put the images beside the rows, and name them by paths that begin there",
        )
    return str(beside / f"{path.parts[0] if len(path.parts) > 1 else ''}/*{path.suffix}".lstrip("/"))


def _recognized(path: Path, row: Mapping[str, Any]) -> dict[str, Any]:
    """The keys for a row. Raises UserError when no format fits it."""
    if keys := _keys(row):
        return keys
    raise UserError(
        f"{path}: no format has the fields {_fields(row)}",
        "pass --format, or rename them to prompt and completion (docs/your-own-data.md)",
    )


def _keys(row: Mapping[str, Any]) -> dict[str, Any] | None:
    texts = {name for name, value in row.items() if isinstance(value, str)}
    if "chosen" in row and "rejected" in row:
        return {"format": "preference"}
    if "completion" in row and isinstance(row.get("label"), bool):
        return {"format": "unpaired-preference"}
    if any(map(_is_conversation, (row.get("messages"), row.get("conversations"), row.get("completion")))):
        return {"format": "chat"}
    if {"instruction", "response"} <= texts:
        return {"format": "dolly"}
    if {"instruction", "output"} <= texts:
        return {"format": "alpaca"}
    if {"prompt", "completion"} <= texts:
        return {"format": "prompt-completion"}
    for question, answer in _PAIRS:
        if {question, answer} <= texts:
            return template(question, answer)
    if "text" in texts:
        return {"format": "text"}
    return None


def _why_unusable(dataset: Dataset, row: Mapping[str, Any]) -> str:
    """As stage dataset says it, as far as that takes no tokenizer."""
    try:
        if dataset.format == "chat":
            conversations.of_row(row, (lambda _: b"") if dataset.images else None)
        elif dataset.format in _COMPLETIONS:
            for name in _COMPLETIONS[dataset.format]:
                prompts.field(row, name)
        elif not dataset.has_answers:
            prompts.check_prompt(dataset, row, "prompt")
        else:
            prompts.prompt(dataset, row)
            if dataset.format != "text":
                prompts.completion(dataset, row)
    except UserError as error:
        return str(error)
    return ""


def template(question: str, answer: str) -> dict[str, Any]:
    """The keys of format template for rows with these two fields."""
    return {
        "format": "template",
        "prompt_template": f"{{{{ {question} }}}}\n",
        "completion_template": f"{{{{ {answer} }}}}",
    }


def text_of(field: str) -> dict[str, Any]:
    """The keys for rows that have a text in this field."""
    return (
        {"format": "text"} if field == "text" else {"format": "template", "completion_template": f"{{{{ {field} }}}}"}
    )


def _prompt(keys: Mapping[str, Any], row: Mapping[str, Any]) -> Any:
    if keys["format"] == "chat":
        try:
            messages = conversations.of_row(row).messages
        except UserError:
            return None
        asked = [str(message["content"]) for message in messages if message["role"] == "user"]
        return asked[0] if asked and len(asked[0]) < _LONG else None
    question = re.search(r"{{ (\w+) }}", keys.get("prompt_template", ""))
    names = (question[1],) if question else _PROMPT_FIELDS.get(keys["format"], ())
    prompt = {name: row[name] for name in names if isinstance(row.get(name), str)}
    return prompt if prompt and sum(map(len, prompt.values())) < _LONG else None


def _is_conversation(value: object) -> bool:
    keys = ({"role", "content"}, {"role", "tool_calls"}, {"from", "value"})
    return isinstance(value, list) and all(
        isinstance(one, dict) and any(one.keys() >= wanted for wanted in keys) for one in value
    )


def _fields(row: Mapping[str, Any]) -> str:
    return shortened(", ".join(row))
