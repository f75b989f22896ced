"""More tokens for the tokenizer of a model directory: their ids, and the rows that the model needs for them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from hyperpod_ft import publish
from hyperpod_ft.checkpoint.formats import model_directory
from hyperpod_ft.checkpoint.formats.json_file import read, read_object
from hyperpod_ft.checkpoint.formats.safetensors_file import has_weights
from hyperpod_ft.errors import UserError

FILE = "tokenizer.json"
_OLDER_FILE = "added_tokens.json"
_REMEDY = "download the model again"
# Matched as written, wherever it occurs.
_FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
# A vocabulary grows to a multiple of this: degrees of tensor parallelism divide it, and kernels are fastest.
_MULTIPLE = 64


@dataclass(frozen=True)
class NumberedTokens:
    """Tokens by their ids. `known`: those that the tokenizer has; `new`: those that it lacks, in order.

    `first`: the id of the first new one.
    """

    known: Mapping[str, int]
    new: Mapping[str, int]
    first: int

    def rows(self, vocabulary: int) -> int:
        """The rows that embedding and output layer need for these tokens, of `vocabulary` that they have."""
        return _enough(1 + max((*self.known.values(), *self.new.values())), vocabulary)


class _Token(BaseModel):
    id: int
    content: str


class _Vocabulary(BaseModel):
    vocab: dict[str, int] | list[tuple[str, float]]  # BPE, WordPiece and WordLevel; Unigram


class _Tokenizer(BaseModel):
    added_tokens: list[_Token]
    model: _Vocabulary


def numbered(directory: Path, tokens: Sequence[str]) -> NumberedTokens:
    """The ids that `tokens` have in a model's tokenizer, and those that new ones get.

    They are what the `tokenizers` library gives (added_vocabulary.rs, `add_tokens`). Raises UserError when there is no
    tokenizer.json, or it is damaged.
    """
    ids, first = _ids(_file(directory), (directory / FILE).stat().st_mtime_ns)
    lacking = (token for token in tokens if token not in ids)
    return NumberedTokens(
        {token: ids[token] for token in tokens if token in ids},
        {token: number for number, token in enumerate(lacking, first)},
        first,
    )


def add(directory: Path, tokens: Sequence[str], special: Sequence[str] = ()) -> None:
    """Add tokens to the tokenizer's files. One that is in its vocabulary is matched as a whole from then on.

    Those that are `special` are left out where answers are decoded without special tokens.
    """
    values, found = read_object(_file(directory), _REMEDY), numbered(directory, [*tokens, *special])
    there = {token["content"] for token in values["added_tokens"]}
    ids = {token: number for token, number in {**found.known, **found.new}.items() if token not in there}
    described = {number: {"content": token, **_FLAGS, "special": token in special} for token, number in ids.items()}
    added = [{"id": number, **token} for number, token in described.items()]
    values["added_tokens"] = sorted([*values["added_tokens"], *added], key=lambda token: token["id"])
    publish.write_json(directory / FILE, values)
    _describe(directory / model_directory.TOKENIZER_CONFIG, described, special)
    older = directory / _OLDER_FILE
    if older.is_file():
        publish.write_json(older, read_object(older, _REMEDY) | ids)


def _describe(file: Path, tokens: Mapping[int, Mapping[str, Any]], special: Sequence[str]) -> None:
    """Repeat tokens in tokenizer_config.json, as transformers before 5 does, and name the special ones."""
    values = read_object(file, _REMEDY) if file.is_file() else {}
    if "added_tokens_decoder" in values:
        values["added_tokens_decoder"] |= {str(number): token for number, token in tokens.items()}
    if special:
        # its name since transformers 5, which still reads the other
        newer = isinstance(values.get("extra_special_tokens"), list)
        key = "extra_special_tokens" if newer else "additional_special_tokens"
        values[key] = list(dict.fromkeys([*(values.get(key) or ()), *special]))
    if values:
        publish.write_json(file, values)


def with_room(config: Mapping[str, Any], directory: Path, tokens: Sequence[str]) -> dict[str, Any]:
    """A config.json as it is once `tokens` are added to the model in `directory`; at most so large without its files.

    Raises UserError as `numbered` does.
    """
    vocabulary = model_directory.of_language_model(config).get("vocab_size")
    if not tokens or not isinstance(vocabulary, int):
        return dict(config)
    if has_weights(directory) or (directory / FILE).is_file():
        rows = numbered(directory, tokens).rows(vocabulary)
    else:
        rows = _enough(vocabulary + len(tokens), vocabulary)
    return model_directory.updated(config, {"vocab_size": rows})


def _enough(needed: int, vocabulary: int) -> int:
    return vocabulary if needed <= vocabulary else -(-needed // _MULTIPLE) * _MULTIPLE


def _file(directory: Path) -> Path:
    file = directory / FILE
    if not file.is_file():
        raise UserError(
            f"model.new_tokens: {directory} has no {FILE}, to which they are added",
            "save the tokenizer with transformers, and give that model",
        )
    return file


@lru_cache(maxsize=1)  # takes a second for a large vocabulary, and each point of a sweep asks
def _ids(file: Path, _changed: int) -> tuple[Mapping[str, int], int]:
    """The ids of all tokens, and the next one. `_changed`: when the file was."""
    described = read(file, _Tokenizer, _REMEDY)
    pieces = described.model.vocab
    vocabulary = pieces if isinstance(pieces, dict) else {piece: number for number, (piece, _) in enumerate(pieces)}
    added = {token.content: token.id for token in described.added_tokens}
    return {**vocabulary, **added}, max(len(vocabulary), 1 + max(added.values(), default=-1))
