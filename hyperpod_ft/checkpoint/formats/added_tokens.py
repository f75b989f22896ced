"""More tokens for the tokenizer of a model directory: their ids, and the rows that the model needs for them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from hyperpod_ft import publish
from hyperpod_ft.checkpoint.formats import model_directory
from hyperpod_ft.checkpoint.formats.json_file import read, read_object, validate
from hyperpod_ft.checkpoint.formats.safetensors_file import has_weights
from hyperpod_ft.errors import UserError

FILE = "tokenizer.json"
_OLDER_FILE, _SPECIAL_FILE = "added_tokens.json", "special_tokens_map.json"
_REMEDY = "download the model again"
_OTHERWISE = "leave it out, or add it with another program, and give that model"
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
    model_config = ConfigDict(strict=True)
    id: int
    content: str
    special: bool = False


class _Vocabulary(BaseModel):
    vocab: dict[str, int] | list[tuple[str, float]]  # BPE, WordPiece and WordLevel; Unigram


class _Tokenizer(BaseModel):
    added_tokens: list[_Token]
    model: _Vocabulary


class _Content(BaseModel):
    content: str


class _Settings(BaseModel):
    """tokenizer_config.json, or special_tokens_map.json."""

    added_tokens_decoder: dict[str, dict[str, Any]] = {}
    additional_special_tokens: list[str | _Content] | None = None
    extra_special_tokens: list[str | _Content] | dict[str, Any] | None = None


@dataclass(frozen=True)
class _Known:
    ids: Mapping[str, int]
    special: frozenset[str]
    first: int  # the next id


def numbered(directory: Path, tokens: Sequence[str], special: Sequence[str] = ()) -> NumberedTokens:
    """The ids that `tokens`, and `special` ones, have in a model's tokenizer, and those that new ones get.

    They are what the `tokenizers` library gives (added_vocabulary.rs, `add_tokens`). Raises UserError when there is no
    tokenizer.json, it is damaged, or it has one of `tokens` as a special one or another token with the id of a new one.
    """
    has = _known(_file(directory), (directory / FILE).stat().st_mtime_ns)
    if left_out := [token for token in tokens if token in has.special]:
        raise UserError(
            f"model.new_tokens: {left_out[0]!r} is a special token of the model, which answers leave out",
            "move it to model.new_special_tokens",
        )
    asked = [*tokens, *special]
    new = {token: number for number, token in enumerate((one for one in asked if one not in has.ids), has.first)}
    if new and (taken := set(has.ids.values()).intersection(new.values())):
        token = next(one for one, number in new.items() if number in taken)
        raise UserError(f"model.new_tokens: {directory / FILE} has a token with the id of {token!r}", _OTHERWISE)
    return NumberedTokens({token: has.ids[token] for token in asked if token in has.ids}, new, has.first)


def add(directory: Path, tokens: Sequence[str], special: Sequence[str] = ()) -> None:
    """Add tokens to the tokenizer's files. One that is in its vocabulary is matched as a whole from then on.

    Those that are `special` are left out where answers are decoded without special tokens.
    """
    values, found = read_object(_file(directory), _REMEDY), numbered(directory, tokens, special)
    there, ids = {token["content"] for token in values["added_tokens"]}, {**found.known, **found.new}
    more = [{"id": number, "content": token, **_FLAGS} for token, number in ids.items() if token not in there]
    values["added_tokens"] = sorted([*values["added_tokens"], *more], key=lambda token: token["id"])
    asked = [token for token in values["added_tokens"] if token["content"] in ids]
    for token in asked:
        token["special"] = token["content"] in special
    publish.write_json(directory / FILE, values)
    _describe(directory, asked, special)
    older = directory / _OLDER_FILE
    if older.is_file():
        publish.write_json(older, read_object(older, _REMEDY) | {token["content"]: token["id"] for token in more})


def _describe(directory: Path, tokens: Sequence[Mapping[str, Any]], special: Sequence[str]) -> None:
    """Repeat tokens in tokenizer_config.json, as transformers before 5 does, and name the special ones."""
    values = _settings(directory / model_directory.TOKENIZER_CONFIG)
    if "added_tokens_decoder" in values:
        decoder = values["added_tokens_decoder"]
        for token in tokens:
            described = {key: value for key, value in token.items() if key != "id"}
            number = str(token["id"])
            decoder[number] = described | decoder.get(number, {}) | {"special": token["special"]}
    if special:
        # its name since transformers 5, which still reads the other
        newer = isinstance(values.get("extra_special_tokens"), list)
        key = "extra_special_tokens" if newer else "additional_special_tokens"
        listed = values.get(key)
        if listed is None:  # transformers reads the other file's where this one has none
            listed = _settings(directory / _SPECIAL_FILE).get(key) or []
        names = [one if isinstance(one, str) else one["content"] for one in listed]
        values[key] = [*listed, *(token for token in special if token not in names)]
    if values:
        publish.write_json(directory / model_directory.TOKENIZER_CONFIG, values)


def _settings(file: Path) -> dict[str, Any]:
    """Nothing without the file. Raises UserError for one that lists tokens in another way."""
    values = read_object(file, _REMEDY) if file.is_file() else {}
    validate(file, values, _Settings, _REMEDY)
    return values


def with_room(
    config: Mapping[str, Any], directory: Path, tokens: Sequence[str], special: Sequence[str] = ()
) -> dict[str, Any]:
    """A config.json as it is once tokens are added to the model in `directory`; at most so large without its files.

    Raises UserError as `numbered` does.
    """
    vocabulary = model_directory.of_language_model(config).get("vocab_size")
    if not (tokens or special) or not isinstance(vocabulary, int):
        return dict(config)
    if has_weights(directory) or (directory / FILE).is_file():
        rows = numbered(directory, tokens, special).rows(vocabulary)
    else:
        rows = _enough(vocabulary + len(tokens) + len(special), vocabulary)
    return model_directory.updated(config, {"vocab_size": rows})


def _enough(needed: int, vocabulary: int) -> int:
    return vocabulary if needed <= vocabulary else -(-needed // _MULTIPLE) * _MULTIPLE


def lacking(source: object) -> UserError:
    """What is wrong with a model that has no tokenizer.json."""
    return UserError(
        f"model.new_tokens: {source} has no {FILE}, to which they are added",
        "save the tokenizer with transformers, and give that model",
    )


def _file(directory: Path) -> Path:
    file = directory / FILE
    if not file.is_file():
        raise lacking(directory)
    return file


@lru_cache(maxsize=1)  # takes a second for a large vocabulary, and each point of a sweep asks
def _known(file: Path, _changed: int) -> _Known:
    """The tokens of a tokenizer. `_changed`: when the file was."""
    described = read(file, _Tokenizer, _REMEDY)
    pieces = described.model.vocab
    vocabulary = pieces if isinstance(pieces, dict) else {piece: number for number, (piece, _) in enumerate(pieces)}
    added = {token.content: token.id for token in described.added_tokens}
    ids = {**vocabulary, **added}
    # the model gets a row for each id; gaps are few in a sound one
    if wrong := [token for token, number in ids.items() if not 0 <= number < 2 * len(ids)]:
        raise UserError(
            f"model.new_tokens: {file}: the id of {wrong[0]!r:.80} is negative, or far above its {len(ids)} tokens",
            "add the tokens with another program, and give that model",
        )
    special = frozenset(token.content for token in described.added_tokens if token.special)
    return _Known(ids, special, max(len(vocabulary), 1 + max(added.values(), default=-1)))
