"""Stage `dataset`: raw rows to exact-length token rows, once, on CPU.

python -m hyperpod_ft.stages.dataset RUN_DIR

Reads `run.raw_dataset` with the tokenizer of `run.base_model` and leaves `run.dataset` (see data/prepared.py).
The same inputs give the same bytes, whatever the number of processes.
"""

import gc
import os

if __name__ == "__main__":
    # What takes more time than it gives here, and has to be said before the imports:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's, for linear algebra
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # looked for in every installed package
    os.environ["USE_TORCH"] = "0"  # transformers renders chats without: three seconds and 270 MB
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    gc.set_threshold(50_000)  # of the many objects of a row, none is in a cycle

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hyperpod_ft import publish
from hyperpod_ft.config.run_config import Dataset
from hyperpod_ft.data import formats, packing, prepared, reading, workers
from hyperpod_ft.data.encoder import Encoder
from hyperpod_ft.data.example import Example
from hyperpod_ft.data.packing import Layout, PackedRows
from hyperpod_ft.data.prepared import Sample, SplitName
from hyperpod_ft.data.reading import Chunk, Row
from hyperpod_ft.data.report import DatasetReport, RowCount
from hyperpod_ft.data.tokenization import TOO_LONG, Tokens, TokenStream
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages.stage import Result, main

SAMPLES_PER_SPLIT = 256
_PROGRESS_SECONDS = 5.0
_TOKENS_PER_BLOCK = 1 << 17  # written at once: what fits the processor's cache takes half the time


def work(run: Run) -> Result:
    dataset = run.config.dataset
    encoder = Encoder.load(run.base_model, chat=dataset.format == "chat")
    chunks = reading.chunks(run.raw_dataset)
    run.dataset.parent.mkdir(parents=True, exist_ok=True)
    stream = TokenStream(run.dataset.parent)
    account, ordinals = _tokenize(run.raw_dataset, chunks, dataset, encoder, stream)
    account.check(dataset)
    examples = stream.tokens()
    drawn = draw(len(examples), dataset.validation_share, run.config.seed)
    with publish.new_directory(run.dataset) as directory:
        layouts = {
            "train": _write(directory, "train", examples, drawn.train, dataset, run.config.seed, encoder.pad),
            "validation": _write(
                directory, "validation", examples, drawn.validation, dataset, run.config.seed, encoder.pad
            ),
        }
        report = _report(account, examples, drawn, layouts, dataset.max_length)
        chosen = _Chosen(run.raw_dataset, chunks, ordinals, dataset, encoder)
        prepared.write_samples(directory, chosen.samples(drawn))
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
    directory: Path, chunks: list[Chunk], dataset: Dataset, encoder: Encoder, stream: TokenStream
) -> tuple[RowCount, list[NDArray[np.int64]]]:
    """Into `stream`. Also the ordinals of each chunk's examples: which of its rows they were."""
    account, ordinals = RowCount(), []
    started = reported = time.monotonic()
    for number, part in enumerate(workers.tokenize_all(directory, chunks, dataset, encoder), 1):
        account.add(part)
        ordinals.append(part.ordinals)
        stream.add(part.tokens)
        now = time.monotonic()
        if now - reported >= _PROGRESS_SECONDS or number == len(chunks):
            reported = now
            rate = account.rows_read / max(now - started, 1e-9)
            print(
                f"tokenized {account.rows_read:,} rows, {number / len(chunks):.0%} of the data, {rate:,.0f} rows/s",
                flush=True,
            )
    return account, ordinals


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
    layout = packing.pack(dataset.packing, examples.starts, examples.lengths, chosen, length, seed)

    def blocks() -> Iterator[PackedRows]:
        for first, stop in prepared.blocks_of(layout.row_count, max(1, _TOKENS_PER_BLOCK // length)):
            yield packing.fill(layout, examples.ids, examples.trained, first, stop, length, pad)

    prepared.write_split(directory, name, blocks(), layout.row_count, length)
    return layout


@dataclass(frozen=True)
class _Chosen:
    """Finds the text of examples again by reading their chunks a second time: no run holds all text in memory."""

    directory: Path
    chunks: list[Chunk]
    ordinals: list[NDArray[np.int64]]
    dataset: Dataset
    encoder: Encoder

    def samples(self, drawn: Draw) -> list[Sample]:
        wanted: list[tuple[SplitName, int]] = [
            *(("train", example) for example in drawn.train[:SAMPLES_PER_SPLIT].tolist()),
            *(("validation", example) for example in drawn.validation[:SAMPLES_PER_SPLIT].tolist()),
        ]
        found = self._examples(np.array([example for _, example in wanted], np.int64))
        return [Sample(split, found[example].prompt, found[example].completion) for split, example in wanted]

    def _examples(self, wanted: NDArray[np.int64]) -> dict[int, Example]:
        ends = np.cumsum([len(ordinals) for ordinals in self.ordinals])
        chunk_of = np.searchsorted(ends, wanted, side="right")
        found: dict[int, Example] = {}
        for number in np.unique(chunk_of).tolist():
            here = np.sort(wanted[chunk_of == number])  # in the order of their rows
            ordinals = self.ordinals[number][here - (ends[number] - len(self.ordinals[number]))]
            rows = reading.read(self.directory, self.chunks[number], frozenset(ordinals.tolist()))
            for example, row in zip(here.tolist(), rows, strict=True):
                assert isinstance(row, Row)  # it became an example the first time
                found[example] = formats.render(self.dataset, row.values, self.encoder.tokenizer)
        return found


def _report(
    account: RowCount, examples: Tokens, drawn: Draw, layouts: dict[str, Layout], max_length: int
) -> DatasetReport:
    tokens = len(examples.ids)
    rows = {name: layout.row_count for name, layout in layouts.items()}
    return DatasetReport(
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
    main("dataset", work)
