"""Batches of rows with images, by TRL's own collator."""

import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import get_worker_info
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from hyperpod_ft.data.images import files
from hyperpod_ft.data.images.reader import ImageReader
from hyperpod_ft.data.images.stored import ImageRows
from hyperpod_ft.engines.batches import PackedSplit
from hyperpod_ft.engines.trl.rows import RowCollator
from hyperpod_ft.runs.job_files import STOP_SIGNALS


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
    """Makes batches of prompts with images, and their answers, also in worker processes."""

    def __init__(self, split: PackedSplit, model: Path) -> None:
        super().__init__(split, flat=False, pad=0)  # the processor pads
        self._model, self._reader = model, ImageReader.load(model)
        self._batches: dict[Path, ImageBatches] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """A worker that is not forked, as from Python 3.14 on, reads the files itself."""
        return _collator, (self._split.directory, self._model)

    def batch(self, split: PackedSplit, rows: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """As `ImageBatches.of`."""
        if get_worker_info() is not None:
            # Slurm sends them to every process; the trainer still takes batches before it saves, and ends its workers
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_IGN)
        if split.directory not in self._batches:
            self._batches[split.directory] = ImageBatches(split.directory, self._reader)
        return self._batches[split.directory].of(rows.tolist())


def _collator(split: Path, model: Path) -> ImageCollator:
    return ImageCollator(PackedSplit(split), model)
