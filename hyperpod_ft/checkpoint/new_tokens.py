"""A model that has more tokens: in its tokenizer, and with a row of embedding and output layer for each.

A new row is the mean of the rows of all tokens before. The logit of a new token is then the mean of theirs: by Jensen's
inequality, n new ones beside V take at most n / (V + n) of the probability, while rows near 0 may take nearly all
(Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models").
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from hyperpod_ft import publish
from hyperpod_ft.checkpoint.formats import added_tokens, model_directory
from hyperpod_ft.checkpoint.formats.added_tokens import NumberedTokens
from hyperpod_ft.checkpoint.formats.json_file import read_object, validate
from hyperpod_ft.checkpoint.formats.safetensors_file import INDEX, read_metadata, read_model
from hyperpod_ft.checkpoint.formats.safetensors_writer import Outgoing, copied, write_files
from hyperpod_ft.checkpoint.tensors import reading
from hyperpod_ft.checkpoint.tensors.direct import BLOCK_BYTES
from hyperpod_ft.checkpoint.tensors.elements import STORED, Stored, narrow
from hyperpod_ft.checkpoint.tensors.logical_tensor import LogicalTensor
from hyperpod_ft.errors import UserError
from hyperpod_ft.progress import ByteProgress, count

_EXTENDED = ".extended"
_OUTPUTS = (model_directory.OUTPUT, "lm_head.bias", "embed_out.weight")  # the last is GPT-NeoX's
# Where they have as many rows: embedding and output layer again, in T5 and in layers that predict several tokens
# (DeepSeek-V3, GLM-4.5); Gemma 4's second embedding, of which Gemma 3n's may have fewer.
_OTHERS = ("embed_tokens.weight", "shared_head.head.weight", "embed_tokens_per_layer.weight")
_SECOND_SIZE = "vocab_size_per_layer_input"
_REMEDY = "leave it out, or add them with another program, and give that model"


class _Sized(BaseModel):
    vocab_size: int | None = None


@dataclass(frozen=True)
class _Extension:
    """What gives each new token its row: nothing if there are no `new` rows, and more rows if `rows` are more."""

    stored: Mapping[str, LogicalTensor]
    outer: Mapping[str, LogicalTensor]  # those with a row for each token
    vocabulary: int  # rows before
    rows: int
    new: range

    @property
    def files(self) -> dict[str, list[LogicalTensor]]:
        """The tensors of the files that change."""
        found: dict[str, list[LogicalTensor]] = {}
        if self.new:
            found = {tensor.pieces[0].file.name: [] for tensor in self.outer.values()}
        for tensor in self.stored.values():
            if (file := tensor.pieces[0].file.name) in found:
                found[file].append(tensor)
        return found

    @property
    def growth(self) -> int:
        """In bytes."""
        return sum(tensor.nbytes // self.vocabulary for tensor in self.outer.values()) * (self.rows - self.vocabulary)

    @property
    def nbytes(self) -> int:
        """Of the files that change, with their new rows."""
        return sum(tensor.nbytes for tensors in self.files.values() for tensor in tensors) + self.growth


def added_bytes(directory: Path, tokens: Sequence[str], special: Sequence[str] = ()) -> int:
    """What `add_tokens` writes beside the files that are there. Raises UserError as it does."""
    return _extension(directory, added_tokens.numbered(directory, tokens, special)).nbytes


def add_tokens(directory: Path, tokens: Sequence[str], special: Sequence[str] = ()) -> str:
    """Add tokens, and special ones, to the model in `directory`; what was done, in words.

    Files with other tensors than those of the vocabulary stay as they are, and none is written in place: it may be a
    link. Raises UserError for a tokenizer without tokenizer.json, and a model whose embedding is not known.
    """
    found = added_tokens.numbered(directory, tokens, special)
    if found.known:
        print(f"model.new_tokens: tokens already: {', '.join(map(repr, found.known))}", flush=True)
    more = _add_rows(directory, _extension(directory, found))
    added_tokens.add(directory, tokens, special)
    return f"{count(len(found.new), 'token')} and {count(more, 'row')} added"


def _add_rows(directory: Path, made: _Extension) -> int:
    """Write the files that change; how many rows there are more than before."""
    if not (files := made.files):
        return 0
    with publish.new_directory(directory / _EXTENDED) as target, ByteProgress("new rows", made.nbytes) as progress:
        for file, tensors in files.items():
            outgoing = [
                _with_rows(tensor, made.rows, made.new) if tensor.name in made.outer else copied(tensor)
                for tensor in tensors
            ]
            write_files(target, {file: outgoing}, progress, read_metadata(directory / file))
    for file in files:
        (directory / _EXTENDED / file).replace(directory / file)
    publish.remove(directory / _EXTENDED)
    if made.rows > made.vocabulary:
        _count_bytes(directory / INDEX, made.growth)
        described = model_directory.of_language_model(model_directory.read_config(directory))
        keys = ("vocab_size", *(key for key in (_SECOND_SIZE,) if described.get(key) == made.vocabulary))
        model_directory.update_config(directory, dict.fromkeys(keys, made.rows))
    return made.rows - made.vocabulary


def _extension(directory: Path, tokens: NumberedTokens) -> _Extension:
    """What gives each new token its row; nothing where all have theirs."""
    config = model_directory.read_config(directory)
    stored = {tensor.name: tensor for tensor in read_model(directory)}
    outer = _outer(config, stored)
    vocabulary = next(iter(outer.values())).shape[0]
    described = model_directory.of_language_model(config)
    stated = validate(directory / model_directory.CONFIG, described, _Sized, "download the model again").vocab_size
    sizes = {vocabulary if stated is None else stated, *(tensor.shape[0] for tensor in outer.values())}
    if len(sizes) > 1 or not vocabulary:
        listed = " and ".join(map(str, sorted(sizes)))
        raise UserError(f"model.new_tokens: the model has matrices for {listed} tokens", _REMEDY)
    rows = tokens.rows(vocabulary)
    # padding is as unlikely as the new tokens; rows that were there may have a use that the tokenizer does not show
    stop = rows if rows > vocabulary else min(rows, tokens.first + len(tokens.new))
    return _Extension(stored, outer, vocabulary, rows, range(min(tokens.first, vocabulary), stop))


def _outer(config: Mapping[str, Any], stored: Mapping[str, LogicalTensor]) -> dict[str, LogicalTensor]:
    """The tensors with a row for each token: embeddings under all their names, and output layers."""
    stored = {name: tensor for name, tensor in stored.items() if tensor.shape}
    embedding = model_directory.embedding(model_directory.without_predictors(config, stored))
    outputs = [name for name in stored if name.endswith(_OUTPUTS)]
    if embedding is None or not (outputs or model_directory.is_tied(config, stored)):
        raise UserError("model.new_tokens: the names of the model's embedding and output layer are not known", _REMEDY)
    rows = stored[embedding].shape[0]
    others = [name for name in stored if name.endswith(_OTHERS) and stored[name].shape[0] == rows]
    return {name: stored[name] for name in (embedding, *others, *outputs)}


def _with_rows(tensor: LogicalTensor, rows: int, new: range) -> Outgoing:
    """The tensor with so many rows, of which the `new` ones are the mean of those before them."""
    width = prod(tensor.shape[1:])
    row = np.empty(width, STORED[tensor.dtype])
    narrow(_mean(tensor, new.start), tensor.dtype, row)

    def fill(begin: int, end: int, out: Stored) -> None:
        low, high = (min(max(edge * width, begin), end) for edge in (new.start, new.stop))
        reading.fill(tensor, begin, low, out[: low - begin])
        out[low - begin : high - begin] = row[np.arange(low, high) % width]
        reading.fill(tensor, high, end, out[high - begin :])

    return Outgoing(tensor.name, tensor.dtype, (rows, *tensor.shape[1:]), fill)


def _mean(tensor: LogicalTensor, rows: int) -> NDArray[np.float64]:
    """Of the first rows, summed in fp64, block by block."""
    width = prod(tensor.shape[1:])
    step = max(1, BLOCK_BYTES // (4 * width))
    total, buffer = np.zeros(width), np.empty(step * width, np.float32)
    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        block = buffer[: (end - begin) * width]
        reading.fill_as(tensor, "F32", begin * width, end * width, block)
        total += block.reshape(-1, width).sum(axis=0, dtype=np.float64)
    return total / rows


def _count_bytes(index: Path, more: int) -> None:
    """Correct the size of all tensors in an index that gives it."""
    values = read_object(index, "download the model again") if index.is_file() else {}
    noted = values.get("metadata")
    if isinstance(noted, dict) and isinstance(noted.get("total_size"), int | float):
        noted["total_size"] += more
        publish.write_json(index, values)
