"""Batches of rows with images, by TRL's own collator."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from hyperpod_ft.data.images import files
from hyperpod_ft.data.images.reader import ImageReader
from hyperpod_ft.data.images.stored import ImageRows
from hyperpod_ft.engines.batches import PackedSplit
from hyperpod_ft.engines.trl.rows import RowCollator


class ImageBatches:
    """Batches of a split's rows."""

    def __init__(self, directory: Path, reader: ImageReader) -> None:
        self._rows = ImageRows(directory)
        self._collate = DataCollatorForVisionLanguageModeling(reader.processor, completion_only_loss=True)

    def of(self, rows: Iterable[int]) -> dict[str, torch.Tensor]:
        """What the model takes in: `input_ids`, `labels` and others, int64 [rows, longest row]; pixels, fp32.

        Padding is at the right; its labels, and those of prompts, are -100.
        """
        return dict(self._collate([self._example(row) for row in rows]))

    def _example(self, row: int) -> dict[str, Any]:
        found, images = self._rows[row]
        return {"prompt": found.prompt, "completion": found.completion, "images": files.opened(images)}


class ImageCollator(RowCollator):
    """Makes batches of prompts with images, and their answers."""

    def __init__(self, split: PackedSplit, reader: ImageReader) -> None:
        super().__init__(split, flat=False, pad=0)  # the processor pads
        self._reader = reader
        self._batches: dict[Path, ImageBatches] = {}

    def batch(self, split: PackedSplit, rows: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """As `ImageBatches.of`."""
        if split.directory not in self._batches:
            self._batches[split.directory] = ImageBatches(split.directory, self._reader)
        return self._batches[split.directory].of(rows.tolist())
