"""Which format of section `dataset` a dataset has: from its first rows, or from its name on the Hub."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from hyperpod_ft.config.fields import shortened
from hyperpod_ft.config.sections.dataset import Dataset
from hyperpod_ft.data import reading
from hyperpod_ft.errors import UserError

_ROWS = 50
_LONG = 1000  # characters of a prompt that a run file need not have

# Datasets whose formats are known without a look at them, by Hub id.
_ON_THE_HUB: dict[str, dict[str, Any]] = {
    "databricks/databricks-dolly-15k": {"format": "dolly", "files": ["databricks-dolly-15k.jsonl"]},
    "tatsu-lab/alpaca": {"format": "alpaca", "files": ["data/train-*.parquet"]},
    "yahma/alpaca-cleaned": {"format": "alpaca", "files": ["alpaca_data_cleaned.json"]},
    "HuggingFaceH4/ultrachat_200k": {"format": "chat", "files": ["data/train_sft-*.parquet"]},
    "HuggingFaceH4/ultrafeedback_binarized": {"format": "preference", "files": ["data/train_prefs-*.parquet"]},
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
}


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


def of_files(path: Path) -> FoundFormat:
    """The format of a local file, or of the files of a directory, from their first rows.

    Raises UserError when there is no row, or no format fits all of them.
    """
    rows = list(islice(_rows(path), _ROWS))
    if not rows:
        raise UserError(f"{path}: has no rows", "give a JSON Lines, JSON or parquet file")
    found = _recognized(path, rows[0].values)
    for row in rows[1:]:
        if _recognized(path, row.values) != found:
            raise UserError(
                f"{path}: {row.where}: has other fields than the first row ({_fields(row.values)})",
                "give the format with --format, and set dataset.max_bad_rows for rows that do not have it",
            )
    counted = "its only row" if len(rows) == 1 else f"its first {len(rows)} rows"
    return FoundFormat(found, f"recognized from {counted}: {_fields(rows[0].values)}", _prompt(found, rows[0].values))


def count_raw_rows(path: Path, most: int) -> int:
    """The raw rows of a local file or directory, counted up to `most`; 0 where they cannot be read here."""
    try:
        return sum(1 for _ in islice(_rows(path), most))
    except (UserError, OSError, ValueError):  # pyarrow's errors are ValueErrors
        return 0


def _rows(path: Path) -> Iterator[reading.RawRow]:
    directory = path if path.is_dir() else path.parent
    names = [path.name]
    if path.is_dir():
        patterns = Dataset.model_fields["files"].default
        names = sorted({file.relative_to(path).as_posix() for pattern in patterns for file in path.glob(pattern)})
    for name in names:
        try:
            for chunk in reading.chunks_of(directory, name):
                yield from (row for row in reading.read(directory, chunk) if isinstance(row, reading.RawRow))
        except ImportError as error:
            raise UserError(
                f"{name}: reading parquet needs pyarrow, which is not installed here", "pass --format"
            ) from error


def _recognized(path: Path, row: Mapping[str, Any]) -> dict[str, Any]:
    texts = {name for name, value in row.items() if isinstance(value, str)}
    if "chosen" in row and "rejected" in row:
        return {"format": "preference"}
    if _is_conversation(row.get("messages")):
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
    if isinstance(row.get("conversations"), list):
        raise UserError(
            f"{path}: conversations of from and value (ShareGPT) are not a format",
            "convert each row to messages of role and content",
        )
    raise UserError(
        f"{path}: no format has the fields {_fields(row)}",
        "pass --format, or rename them to prompt and completion (docs/your-own-data.md)",
    )


def template(question: str, answer: str) -> dict[str, Any]:
    """The keys of format template for rows with these two fields."""
    return {
        "format": "template",
        "prompt_template": f"{{{{ {question} }}}}\n",
        "completion_template": f"{{{{ {answer} }}}}",
    }


def _prompt(keys: Mapping[str, Any], row: Mapping[str, Any]) -> Any:
    if keys["format"] == "chat":
        asked = [str(message["content"]) for message in row["messages"] if message["role"] == "user"]
        return asked[0] if asked and len(asked[0]) < _LONG else None
    question = re.search(r"{{ (\w+) }}", keys.get("prompt_template", ""))
    names = (question[1],) if question else _PROMPT_FIELDS.get(keys["format"], ())
    prompt = {name: row[name] for name in names if isinstance(row.get(name), str)}
    return prompt if prompt and sum(map(len, prompt.values())) < _LONG else None


def _is_conversation(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) and {"role", "content"} <= one.keys() for one in value)


def _fields(row: Mapping[str, Any]) -> str:
    return shortened(", ".join(row))
