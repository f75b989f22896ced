"""The small model on disk, with random weights, as its publisher would save it; and the rows that it is given."""

from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import logging

from hyperpod_ft.checkpoint.formats.pretrained import auto_class
from hyperpod_ft.data.packing import PackedRows, Packing, fill
from hyperpod_ft.engines.certificate.small import VOCABULARY, small_config
from hyperpod_ft.errors import printable

LENGTHS = (7, 11, 3, 9)
"""Of the documents: longer and shorter than a window. They fill a row."""


class NotBuiltError(Exception):
    """No small model of this kind can be built."""

    @classmethod
    def of(cls, error: Exception) -> "NotBuiltError":
        """With one of transformers' errors as the reason."""
        return cls(printable(" ".join(f"{type(error).__name__}: {error}".split()))[:200])


def save_small(source: Path, directory: Path) -> PreTrainedModel:
    """Write a small model of the kind of the one in `source`, of which only config.json is read. Raises NotBuiltError.

    Weights are large enough that attention, gates and caps matter, and no two tensors are alike.
    """
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    try:
        values = small_config(config.to_dict())
        small = AutoConfig.for_model(values.pop("model_type"), **values)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            loader = auto_class(small.to_dict())
            model: PreTrainedModel = loader.from_config(small, attn_implementation="eager", dtype=torch.float32)
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    torch.nn.init.normal_(parameter, std=0.2)
                else:
                    torch.nn.init.normal_(parameter, mean=1.0, std=0.1)
        model.save_pretrained(directory)
    except Exception as error:  # transformers' classes raise errors of any type
        raise NotBuiltError.of(error) from error
    model.train()
    return model


def documents(first_seed: int = 1) -> list[torch.Tensor]:
    """Random ids int64 [1, length] of each document; `first_seed`: of the first one, the others are always the same."""

    def ids(length: int, seed: int) -> torch.Tensor:
        return torch.randint(3, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))

    return [ids(length, seed) for length, seed in zip(LENGTHS, (first_seed, 2, 3, 4), strict=True)]


def rows(texts: list[torch.Tensor], *, packed: bool) -> PackedRows:
    """The documents in one row, or each in its own with padding, as stage dataset fills them."""
    ids = torch.cat(texts, 1)[0].numpy().astype(np.int32)
    lengths = np.array([text.shape[1] for text in texts], np.int64)
    count = 1 if packed else len(texts)
    starts = lengths.cumsum() - lengths
    trained = np.ones(len(ids), np.bool_)
    trained[starts] = False  # nothing of a document predicts its first token
    placed = Packing(starts, lengths, np.zeros_like(lengths) if packed else np.arange(count), count)
    return fill(placed, ids, trained, 0, count, len(ids), 0)
