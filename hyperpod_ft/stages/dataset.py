"""Stage `dataset`: raw rows to exact-length token rows, once, on CPU.

python -m hyperpod_ft.stages.dataset RUN_DIR

Reads `run.raw_dataset` with the tokenizer of `run.base_model` and leaves `run.dataset` (see data/prepared.py).
The same inputs give the same bytes, whatever the number of processes.
"""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hyperpod_ft import publish
from hyperpod_ft.config import Dataset
from hyperpod_ft.data import formats, packing, prepared, reading, tokenizer, workers
from hyperpod_ft.data.packing import Layout, Rows
from hyperpod_ft.data.prepared import Sample, SplitName
from hyperpod_ft.data.reading import Chunk, Row
from hyperpod_ft.data.report import Account, Report
from hyperpod_ft.data.tokenization import TOO_LONG, TokenizedChunk, Tokens
from hyperpod_ft.data.tokenizer import Tokenizer
from hyperpod_ft.run import Run
from hyperpod_ft.stages.stage import Result, main

SAMPLES_PER_SPLIT = 256
_PROGRESS_SECONDS = 5.0
_TOKENS_PER_BLOCK = 1 << 22  # written at once


def work(run: Run) -> Result:
    dataset = run.config.dataset
    tokens_of_model = tokenizer.load(run.base_model)
    chunks = reading.chunks(run.raw_dataset)
    account, parts = _tokenize(run.raw_dataset, chunks, dataset, tokens_of_model)
    account.check(dataset)
    examples = Tokens.join([part.tokens for part in parts])
    drawn = draw(len(examples), dataset.validation_share, run.config.seed)
    pad = tokenizer.pad_id(tokens_of_model)
    with publish.new_directory(run.dataset) as directory:
        layouts = {
            "train": _write(directory, "train", examples, drawn.train, dataset, run.config.seed, pad),
            "validation": _write(directory, "validation", examples, drawn.validation, dataset, run.config.seed, pad),
        }
        report = _report(account, examples, drawn, layouts, dataset.max_length)
        chosen = _Chosen(run.raw_dataset, chunks, parts, dataset, tokens_of_model)
        prepared.write_samples(directory, [*chosen.samples("train", drawn), *chosen.samples("validation", drawn)])
        prepared.write_report(directory, report.as_dict())
    for line in report.lines():
        print(line, flush=True)
    return Result([run.dataset], report.as_dict())


@dataclass(frozen=True)
class Draw:
    """Examples of each split (int64 indices) in an order drawn from the seed."""

    train: NDArray[np.int64]
    validation: NDArray[np.int64]


def draw(examples: int, validation_share: float, seed: int) -> Draw:
    """One permutation gives the split, the order of training, and the samples. Training keeps one example at least."""
    order = np.random.default_rng([seed, 1]).permutation(examples)
    validation = min(round(examples * validation_share), examples - 1)
    return Draw(order[validation:], order[:validation])


def _tokenize(
    directory: Path, chunks: list[Chunk], dataset: Dataset, tokenizer_: Tokenizer
) -> tuple[Account, list[TokenizedChunk]]:
    account, parts = Account(), []
    started = reported = time.monotonic()
    for number, part in enumerate(workers.tokenize_all(directory, chunks, dataset, tokenizer_), 1):
        account.add(part)
        parts.append(part)
        now = time.monotonic()
        if now - reported >= _PROGRESS_SECONDS or number == len(chunks):
            reported = now
            rate = account.rows_read / max(now - started, 1e-9)
            print(
                f"tokenized {account.rows_read:,} rows, {number / len(chunks):.0%} of the data, {rate:,.0f} rows/s",
                flush=True,
            )
    return account, parts


def _write(
    directory: Path,
    name: SplitName,
    examples: Tokens,
    chosen: NDArray[np.int64],
    dataset: Dataset,
    seed: int,
    pad: int,
) -> Layout:
    length = dataset.max_length
    layout = packing.pack(dataset.packing, examples.starts[:-1], examples.lengths, chosen, length, seed)

    def blocks() -> Iterator[Rows]:
        for first, stop in prepared.blocks_of(layout.row_count, max(1, _TOKENS_PER_BLOCK // length)):
            yield packing.fill(layout, examples.ids, examples.trained, first, stop, length, pad)

    prepared.write_split(directory, name, blocks(), layout.row_count, length)
    return layout


@dataclass(frozen=True)
class _Chosen:
    """Finds the text of examples again by reading their chunks a second time: no run holds all text in memory."""

    directory: Path
    chunks: list[Chunk]
    parts: list[TokenizedChunk]
    dataset: Dataset
    tokenizer: Tokenizer

    def samples(self, split: SplitName, drawn: Draw) -> list[Sample]:
        wanted = (drawn.train if split == "train" else drawn.validation)[:SAMPLES_PER_SPLIT]
        ends = np.cumsum([len(part.tokens) for part in self.parts])
        chunk_of = np.searchsorted(ends, wanted, side="right")
        found: dict[int, Sample] = {}
        for number in np.unique(chunk_of).tolist():
            part = self.parts[number]
            here = wanted[chunk_of == number]
            ordinals = part.ordinals[here - (ends[number] - len(part.tokens))]
            rows = dict(enumerate(reading.read(self.directory, self.chunks[number])))
            for example, ordinal in zip(here.tolist(), ordinals.tolist(), strict=True):
                row = rows[ordinal]
                assert isinstance(row, Row)  # it became an example the first time
                text = formats.render(self.dataset, row.values, self.tokenizer)
                found[example] = Sample(split, text.prompt, text.completion)
        return [found[example] for example in wanted.tolist()]


def _report(account: Account, examples: Tokens, drawn: Draw, layouts: dict[str, Layout], max_length: int) -> Report:
    tokens = int(examples.starts[-1])
    rows = {name: layout.row_count for name, layout in layouts.items()}
    return Report(
        rows_read=account.rows_read,
        rows_used=account.rows_used,
        train_examples=len(drawn.train),
        validation_examples=len(drawn.validation),
        tokens=tokens,
        label_tokens=int(examples.trained.sum()),
        train_rows=rows["train"],
        validation_rows=rows["validation"],
        padding_share=round(1 - tokens / (sum(rows.values()) * max_length), 6),
        truncated=account.truncated,
        dropped=account.bad[TOO_LONG] + account.emptied,
        bad_rows=account.bad.total(),
        bad_reasons=dict(account.bad.most_common()),
        bad_listed=tuple(str(row) for row in account.listed),
    )


if __name__ == "__main__":
    # The tokenizer needs no torch, which would take three more seconds and 270 MB to import.
    os.environ["USE_TORCH"] = "0"
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    main("dataset", work)
