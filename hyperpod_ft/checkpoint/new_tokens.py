"""A model that has more tokens: in its tokenizer, and with a row of embedding and output layer for each.

A new row is the mean of the rows of all tokens before. The logit of a new token is then the mean of theirs: by Jensen's
inequality, n new ones beside V take at most n / (V + n) of the probability, while rows near 0 may take nearly all
(Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models").
"""

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperpod_ft import publish
from hyperpod_ft.checkpoint.formats import added_tokens, model_directory
from hyperpod_ft.checkpoint.formats.added_tokens import NumberedTokens
from hyperpod_ft.checkpoint.formats.json_file import read_object
from hyperpod_ft.checkpoint.formats.resumable import resumable_directory
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
_BY_LAYER = "embed_tokens_per_layer.weight"  # Gemma 4's second embedding; Gemma 3n's may have fewer rows
_REMEDY = "leave it out, or add them with another program, and give that model"


def add_tokens(directory: Path, tokens: Sequence[str], special: Sequence[str] = ()) -> str:
    """Add tokens, and special ones, to the model in `directory`; what was done, in words.

    Files with other tensors than those of the vocabulary stay as they are, and none is written in place: it may be a
    link. Raises UserError for a tokenizer without tokenizer.json, and a model whose embedding is not known.
    """
    found = added_tokens.numbered(directory, [*tokens, *special])
    if found.known:
        print(f"model.new_tokens: tokens already: {', '.join(map(repr, found.known))}", flush=True)
    more = _add_rows(directory, found)
    added_tokens.add(directory, tokens, special)
    return f"{count(len(found.new), 'token')} and {count(more, 'row')} added"


def _add_rows(directory: Path, tokens: NumberedTokens) -> int:
    """Give each new token its row; how many rows there are more than before."""
    config = model_directory.read_config(directory)
    stored = {tensor.name: tensor for tensor in read_model(directory)}
    outer = _outer(config, stored)
    vocabulary = next(iter(outer.values())).shape[0]
    described = model_directory.of_language_model(config)
    sizes = {described.get("vocab_size", vocabulary), *(tensor.shape[0] for tensor in outer.values())}
    if len(sizes) > 1:
        listed = " and ".join(map(str, sorted(sizes)))
        raise UserError(f"model.new_tokens: the model has matrices for {listed} tokens", _REMEDY)
    rows = tokens.rows(vocabulary)
    # padding is as unlikely as the new tokens; rows that were there may have a use that the tokenizer does not show
    new = range(min(tokens.first, vocabulary), rows if rows > vocabulary else tokens.first + len(tokens.new))
    if not new:
        return 0
    changed = {name: _with_rows(tensor, rows, new) for name, tensor in outer.items()}
    files: dict[str, list[Outgoing]] = {tensor.pieces[0].file.name: [] for tensor in outer.values()}
    for name, tensor in stored.items():
        if (file := tensor.pieces[0].file.name) in files:
            files[file].append(changed.get(name) or copied(tensor))
    nbytes = sum(tensor.nbytes for tensors in files.values() for tensor in tensors)
    identity = {"rows": rows, "new": [new.start, new.stop]}
    with resumable_directory(directory / _EXTENDED, identity) as target, ByteProgress("new rows", nbytes) as progress:
        for file, tensors in files.items():
            write_files(target, {file: tensors}, progress, read_metadata(directory / file))
    for file in files:
        (directory / _EXTENDED / file).replace(directory / file)
    publish.remove(directory / _EXTENDED)
    _count_bytes(directory / INDEX, sum(changed[name].nbytes - tensor.nbytes for name, tensor in outer.items()))
    if rows > vocabulary:
        keys = ("vocab_size", *(key for key in ("vocab_size_per_layer_input",) if described.get(key) == vocabulary))
        model_directory.update_config(directory, dict.fromkeys(keys, rows))
    return rows - vocabulary


def _outer(config: Mapping[str, Any], stored: Mapping[str, LogicalTensor]) -> dict[str, LogicalTensor]:
    """The tensors with a row for each token: embeddings, the first one under all its names, and the output layer."""
    embedding = model_directory.embedding(model_directory.without_predictors(config, stored))
    aliases = model_directory.SHARED_ALIASES if embedding == model_directory.SHARED else ()
    outputs = [name for name in stored if name.endswith(_OUTPUTS)]
    if embedding is None or not (outputs or model_directory.is_tied(config, stored)):
        raise UserError("model.new_tokens: the names of the model's embedding and output layer are not known", _REMEDY)
    rows = stored[embedding].shape[0]
    by_layer = [name for name in stored if name.endswith(_BY_LAYER) and stored[name].shape[0] == rows]
    return {name: stored[name] for name in (embedding, *aliases, *by_layer, *outputs) if name in stored}


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
    if isinstance(values.get("metadata"), dict) and "total_size" in values["metadata"]:
        values["metadata"]["total_size"] += more
        publish.write_json(index, values)
