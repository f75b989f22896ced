"""Losses on packed rows, without an engine: each document by itself."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from hyperpod_ft.config.sections.training import Dpo
from hyperpod_ft.data.packing import IGNORED, PackedRows
from hyperpod_ft.data.seq2seq.packing import Seq2SeqRows
from hyperpod_ft.runs.results.samples import Loss

# The most tokens in one forward pass; a row is never cut. Bounds the logits: 4,096 x 128,256 x 2 bytes is 1 GB.
_BATCH_TOKENS = 4096


@torch.inference_mode()
def mean_loss(model: PreTrainedModel, split: PackedRows | Seq2SeqRows, max_rows: int) -> Loss | None:
    """The loss on a split's first `max_rows` rows; None when no token of them is labeled."""
    if isinstance(split, Seq2SeqRows):
        rows = min(len(split), max_rows)
        total, tokens = _of_seq2seq(model, split, rows)
    else:
        found = document_losses(model, split, max_rows)
        rows, total, tokens = found.rows, float(found.summed.sum()), found.tokens
    return Loss(total / tokens, tokens, rows, len(split)) if tokens else None


def source_losses(
    model: PreTrainedModel, split: PackedRows | Seq2SeqRows, max_rows: int, sources: Mapping[str, NDArray[np.int64]]
) -> dict[str, Loss]:
    """The loss on those of a split's first `max_rows` rows that are of each source; `sources`: the rows of each."""
    found = {}
    for name, rows in sources.items():
        first = rows[rows < max_rows]
        own = type(split)(**{array: values[first] for array, values in vars(split).items()})
        if loss := mean_loss(model, own, len(first)):
            found[name] = replace(loss, rows_available=len(rows))
    return found


@torch.inference_mode()
def batches_loss(
    model: PreTrainedModel, batches: Iterable[Mapping[str, torch.Tensor]], rows: int, available: int
) -> Loss | None:
    """The loss on batches of `rows` of the `available` rows, each with its `labels`; None when no token has one."""
    total, tokens = 0.0, 0
    for batch in batches:
        inputs = {name: tensor.to(model.device) for name, tensor in batch.items()}
        labels = inputs.pop("labels")[:, 1:]
        logits, counted = model(**inputs, use_cache=False).logits[:, :-1], labels != IGNORED
        total += float(cross_entropy(logits[counted].float(), labels[counted], reduction="sum"))
        tokens += int(counted.sum())
    return Loss(total / tokens, tokens, rows, available) if tokens else None


def over_all(losses: Collection[Loss]) -> Loss | None:
    """The loss on all rows from those on parts of them."""
    tokens, rows, available = (
        sum(getattr(loss, name) for loss in losses) for name in ("tokens", "rows", "rows_available")
    )
    return Loss(sum(loss.mean * loss.tokens for loss in losses) / tokens, tokens, rows, available) if losses else None


@dataclass(frozen=True)
class DocumentLosses:
    """The losses of the documents in the first `rows` of `rows_available` rows, in their order.

    summed: cross entropies in nats over a document's label tokens, float64 [documents]; tokens: how many there are.
    """

    summed: NDArray[np.float64]
    tokens: int
    rows: int
    rows_available: int


@torch.inference_mode()
def document_losses(model: PreTrainedModel, split: PackedRows, max_rows: int) -> DocumentLosses:
    """The loss of each document by itself, as transformers computes it for any family; those of equal lengths together.

    Documents without labels, as the padding at the end of a row, are left out.
    """
    rows = min(len(split), max_rows)
    documents = [part for row in range(rows) for part in _documents_of(split, row)]
    order = sorted(range(len(documents)), key=lambda number: -len(documents[number][0]))
    summed, tokens, first = np.zeros(len(documents)), 0, 0
    while first < len(order):
        batch = order[first : first + max(1, _BATCH_TOKENS // len(documents[order[first]][0]))]
        first += len(batch)
        ids, labels = (
            torch.nn.utils.rnn.pad_sequence(
                [torch.from_numpy(documents[number][part].astype("int64")) for number in batch],
                batch_first=True,
                padding_value=padding,
            ).to(model.device)
            for part, padding in ((0, 0), (1, IGNORED))
        )
        # nothing before the padding sees it
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        counted = labels[:, 1:] != IGNORED
        losses = cross_entropy(logits[counted].float(), labels[:, 1:][counted], reduction="none")
        of_documents = torch.zeros(len(batch), device=losses.device).index_add_(0, counted.nonzero()[:, 0], losses)
        summed[batch] = of_documents.cpu().numpy()
        tokens += len(losses)
    return DocumentLosses(summed, tokens, rows, len(split))


def _documents_of(split: PackedRows, row: int) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int32]]]:
    """Token ids and labels of each document that has a label to predict."""
    starts = np.flatnonzero(split.position_ids[row] == 0)
    for start, end in pairwise([*starts, split.position_ids.shape[1]]):
        labels = split.labels[row, start:end]
        if (labels[1:] != IGNORED).any():
            yield split.input_ids[row, start:end], labels


def preference_losses(base: DocumentLosses, tuned: DocumentLosses, dpo: Dpo) -> tuple[Loss, Loss]:
    """DPO's loss of both models, a mean over pairs (engines/torch/objectives/objective.py); `base` is the reference."""
    rewards = dpo.beta * (base.summed - tuned.summed)
    margins = rewards[0::2] - rewards[1::2]
    smoothing = dpo.label_smoothing
    of_tuned = (1 - smoothing) * np.logaddexp(0, -margins) + smoothing * np.logaddexp(0, margins)
    return (
        Loss(math.log(2), base.tokens, base.rows, base.rows_available),
        Loss(float(of_tuned.mean()), tuned.tokens, tuned.rows, tuned.rows_available),
    )


def _of_seq2seq(model: PreTrainedModel, split: Seq2SeqRows, rows: int) -> tuple[float, int]:
    """Summed loss and label tokens of an encoder-decoder, which gets each pair of a row as a separate, padded row."""
    total, tokens = 0.0, 0
    for row in range(rows):
        sources, decoder_inputs, labels = (
            _documents(array[row], numbers[row], padding).to(model.device)
            for array, numbers, padding in (
                (split.input_ids, split.documents, -1),
                (split.decoder_input_ids, split.decoder_documents, 0),
                (split.labels, split.decoder_documents, IGNORED),
            )
        )
        logits = model(
            input_ids=sources.clamp(min=0), attention_mask=(sources >= 0).long(), decoder_input_ids=decoder_inputs
        ).logits
        counted = labels != IGNORED
        total += float(cross_entropy(logits[counted].float(), labels[counted], reduction="sum"))
        tokens += int(counted.sum())
    return total, tokens


def _documents(tokens: NDArray[np.int32], numbers: NDArray[np.int32], padding: int) -> torch.Tensor:
    """The documents of a row, int64 [documents, longest]."""
    parts = [torch.from_numpy(tokens[numbers == number].astype("int64")) for number in range(1, numbers.max() + 1)]
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=padding)
