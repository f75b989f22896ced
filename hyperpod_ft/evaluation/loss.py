"""Mean loss a token on packed rows."""

from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from hyperpod_ft.data.packing import IGNORED
from hyperpod_ft.data.prepared import Split

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
def mean_loss(model: PreTrainedModel, split: Split, max_rows: int) -> Loss | None:
    """The loss on a split's first `max_rows` rows; None when no token of them is labelled.

    With position ids that restart and no attention mask, transformers keeps packed documents apart
    (transformers/masking_utils.py, find_packed_sequence_indices).
    """
    rows = min(len(split), max_rows)
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
    return Loss(total / tokens, tokens, rows, len(split)) if tokens else None
