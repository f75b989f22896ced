"""Mean loss a token on packed rows."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from hyperpod_ft.data.packing import IGNORED
from hyperpod_ft.data.prepared import PairedSplit, Split

# The most tokens in one forward pass; a row is never cut. Bounds the logits: 4,096 x 128,256 x 2 bytes is 1 GB.
_BATCH_TOKENS = 4096


@dataclass(frozen=True)
class Loss:
    """Mean cross entropy in nats over `tokens` labelled tokens of the first `rows` of `rows_available` rows."""

    mean: float
    tokens: int
    rows: int
    rows_available: int


@torch.inference_mode()
def mean_loss(model: PreTrainedModel, split: Split | PairedSplit, max_rows: int) -> Loss | None:
    """The loss on a split's first `max_rows` rows; None when no token of them is labelled."""
    rows = min(len(split), max_rows)
    summed = _of_pairs(model, split, rows) if isinstance(split, PairedSplit) else _of_rows(model, split, rows)
    return Loss(summed[0] / summed[1], summed[1], rows, len(split)) if summed[1] else None


def _of_rows(model: PreTrainedModel, split: Split, rows: int) -> tuple[float, int]:
    """Summed loss, and label tokens.

    With position ids that restart and no attention mask, transformers keeps packed documents apart
    (transformers/masking_utils.py, find_packed_sequence_indices).
    """
    step = max(1, _BATCH_TOKENS // split.input_ids.shape[1])
    total, tokens = 0.0, 0
    for first in range(0, rows, step):
        last = min(first + step, rows)
        ids, labels, positions = (
            torch.from_numpy(array[first:last].astype("int64")).to(model.device)
            for array in (split.input_ids, split.labels, split.position_ids)
        )
        logits = model(input_ids=ids, position_ids=positions, attention_mask=None, use_cache=False).logits
        counted = labels[:, 1:] != IGNORED
        total += float(cross_entropy(logits[:, :-1][counted].float(), labels[:, 1:][counted], reduction="sum"))
        tokens += int(counted.sum())
    return total, tokens


def _of_pairs(model: PreTrainedModel, split: PairedSplit, rows: int) -> tuple[float, int]:
    """The same of an encoder-decoder, which gets each pair of a row as a row of its own, padded."""
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
