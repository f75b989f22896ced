"""Which files and rows of a dataset's source are read: those that `dataset.files` matches, of `dataset.split`.

Names tell a file's split as they do for Hugging Face's `datasets`: `test-00000-of-00002.parquet`, `validation/a.jsonl`,
`gsm8k-train.jsonl`.
"""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from hyperpod_ft.config.sections.inputs import Dataset
from hyperpod_ft.errors import UserError

ALL = "all"
_DEFAULT = Dataset.model_fields["split"].default
_PATTERNS = Dataset.model_fields["files"].default
# Of a dataset, by the Hub, `datasets` and LLaMA-Factory: they match `*.json` and have no rows.
_DESCRIPTIONS = {"dataset_infos.json", "dataset_info.json", "dataset_dict.json"}
_IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
_KEYWORD = re.compile(
    r"(?<![^-._ 0-9/])"
    r"(?:(?P<train>train|training)|(?P<validation>validation|valid|dev|val)|(?P<test>test|testing|eval|evaluation))"
    r"(?=[-._ 0-9/])",
    re.IGNORECASE,
)
_SHARD = re.compile(r"(\w+(?:\.\w+)*)-\d{5}-of-\d{5}(?!\d)")


def chosen(names: Sequence[str], source: str, patterns: Sequence[str], split: str) -> list[str]:
    """The names that are read, of all that a source has; `split` may end with a slice of rows, which plays no part.

    In `patterns`, `*` also matches `/`, as on the Hub. A source that is a single file is read whatever its name is.
    Raises UserError when no file matches, or none is of the split.
    """
    if len(names) == 1 and source.endswith(f"/{names[0]}"):
        matching, splits = list(names), {_DEFAULT: list(names)}
    else:
        matching = _matching(names, source, patterns)
        splits = _by_split([name for name in matching if not is_image(name)])
    wanted = split.partition("[")[0]
    only = tuple(patterns) != _PATTERNS and len(splits) == 1 and wanted == _DEFAULT
    if wanted == ALL or only:  # patterns of the user's own that name one split have chosen it
        return sorted(matching)
    if wanted not in splits:
        raise UserError(
            f"dataset.split: {source} has no split {wanted!r}; by its files' names it has {', '.join(sorted(splits))}",
            f"set it to one of them, or to {ALL} for every file that dataset.files matches",
        )
    # of whatever split the rows are that name them
    return sorted([*splits[wanted], *filter(is_image, matching)])


def _matching(names: Sequence[str], source: str, patterns: Sequence[str]) -> list[str]:
    found = [
        name
        for name in names
        if any(fnmatchcase(name, one) for one in patterns)
        and not is_hidden(name)
        and name.rpartition("/")[2] not in _DESCRIPTIONS
    ]
    if not found:
        there = ", ".join(names[:5]) or "no file"
        raise UserError(
            f"dataset.source: no file of {source} matches dataset.files ({', '.join(patterns)})",
            f"correct it: the source has {there}{', ...' if len(names) > 5 else ''}",
        )
    return found


def is_hidden(name: str) -> bool:
    """Whether a file or one of its directories begins with a dot."""
    # `..` is not hidden: the download rejects it
    return any(part.startswith(".") and part != ".." for part in name.split("/"))


def is_image(name: str) -> bool:
    """Whether a file is named by rows, and has none itself."""
    return name.lower().endswith(_IMAGES)


def _by_split(names: Sequence[str]) -> dict[str, list[str]]:
    """The files of each split. Those whose names tell nothing are `train`, unless others say that they are."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(_split_of(name), []).append(name)
    if not any(map(_KEYWORD.search, names)):
        return {_DEFAULT: list(names)}
    unnamed = found.pop("", [])
    if unnamed:
        found.setdefault(_DEFAULT, unnamed)
    return found


def _split_of(name: str) -> str:
    file = name.rpartition("/")[2]
    keyword, shard = _KEYWORD.search(name), _SHARD.match(file)
    if shard and (keyword is None or _KEYWORD.search(file)):
        return shard[1]  # such as train_sft
    return str(keyword.lastgroup) if keyword else ""


def rows_of(split: str, count: int) -> range:
    """Which of the `count` rows of a split are read, from 0: all but for a slice such as `train[:90%]`."""
    first, _, last = split.partition("[")[2].rstrip("]").partition(":")
    return range(count)[_place(first, count) : _place(last, count)]


def _place(text: str, count: int) -> int | None:
    if text.endswith("%"):
        return round(count * int(text[:-1]) / 100)
    return int(text) if text else None
