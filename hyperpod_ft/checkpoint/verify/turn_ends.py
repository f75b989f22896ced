"""Compares what begins and ends an answer with the base's: chat template, and the tokens at which generation stops."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from hyperpod_ft.checkpoint.formats import model_directory
from hyperpod_ft.checkpoint.formats.json_file import read_object
from hyperpod_ft.checkpoint.formats.model_directory import TOKENIZER_CONFIG
from hyperpod_ft.checkpoint.verify.forms import Line, some

_TOKENIZER = "tokenizer.json"
_REMEDY = "download the model again"
_ADDED = re.compile(r'"added_tokens"\s*:\s*(?=\[)')


def compare(tuned: Path, base: Path, adapter: Path | None) -> Iterator[Line]:
    """What differs, in lines. `adapter` was merged: its chat template is that of training.

    Raises UserError when a file cannot be read.
    """
    yield from _templates(tuned, base, adapter)
    yield from _stops(tuned, base)
    rows = _rows(tuned)
    if rows and (beyond := {text for number, text in _tokens(tuned).items() if number >= rows}):
        yield True, f"{tuned / _TOKENIZER}: has tokens beyond the {rows:,} rows of config.json: {some(beyond)}"


def _templates(tuned: Path, base: Path, adapter: Path | None) -> Iterator[Line]:
    mine, theirs = _first_template(tuned), _first_template(base)
    trained = _first_template(adapter) if adapter else None
    if mine is None and not _has_tokenizer(tuned):
        if _has_tokenizer(base):
            yield False, f"{tuned}: has no tokenizer; the base has one"
        return
    if trained is not None and mine != trained:
        yield True, f"{tuned}: its chat template is not the adapter's, with which the model was trained"
    elif mine is None and theirs is not None:
        yield True, f"{tuned}: the base's chat template is lost"
    elif mine != theirs and theirs is not None:
        yield False, f"{tuned}: its chat template differs from the base's"


def _stops(tuned: Path, base: Path) -> Iterator[Line]:
    mine, theirs = model_directory.stop_ids(tuned), model_directory.stop_ids(base)
    texts = _tokens(base) | _tokens(tuned)
    template = _first_template(tuned) or _first_template(base) or ""
    named = {number: texts.get(number, str(number)) for number in (*mine, *theirs)}
    lost = [number for number in theirs if number not in mine]
    ends = [number for number in lost if number in texts and texts[number] in template]
    where = tuned / model_directory.GENERATION_CONFIG
    if not mine and theirs:
        yield True, f"{where}: no token ends an answer; in the base {some([named[one] for one in theirs])} does"
    elif ends:
        yield True, f"{where}: {named[ends[0]]}, which ends a turn, no longer ends an answer"
    elif set(mine) != set(theirs) and theirs:
        now, before = (some([named[one] for one in ids]) for ids in (mine, theirs))
        yield False, f"{where}: {now} ends an answer; in the base {before}"
    own, known = _eos(tuned), {text: number for number, text in texts.items()}
    if own in known and mine and known[own] not in mine and (own != _eos(base) or known[own] in theirs):
        yield True, f"{where}: the tokenizer's end is {own} ({known[own]}), but it does not end an answer"


def _first_template(directory: Path) -> str | None:
    found = model_directory.chat_templates(directory)
    return found[0].strip() if found else None


def _has_tokenizer(directory: Path) -> bool:
    return any(True for pattern in model_directory.TOKENIZER[:2] for _ in directory.glob(pattern))


def _eos(directory: Path) -> str | None:
    file = directory / TOKENIZER_CONFIG
    found = read_object(file, _REMEDY).get("eos_token") if file.is_file() else None
    return found.get("content") if isinstance(found, dict) else found


def _rows(directory: Path) -> int | None:
    config = model_directory.read_config(directory)
    text = config.get("text_config")
    found = config.get("vocab_size", text.get("vocab_size") if isinstance(text, dict) else None)
    return found if type(found) is int else None


def _tokens(directory: Path) -> dict[int, str]:
    """The tokens that were added to the tokenizer's vocabulary, as those that end turns are, by id.

    Only the list of them is parsed: as Python objects, a whole tokenizer.json takes more memory than the weights.
    """
    file = directory / _TOKENIZER
    if not file.is_file():
        return {}
    text = file.read_text(encoding="utf-8", errors="replace")
    if (start := _ADDED.search(text)) is None:
        return {}
    try:
        listed, _ = json.JSONDecoder().raw_decode(text, start.end())
        return {int(one["id"]): str(one["content"]) for one in listed}
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}  # a program that needs the tokenizer says so
