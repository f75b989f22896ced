"""Stage `dataset`: tokenize the raw rows and pack them into rows of equal length, once, on CPUs.

python -m hyperpod_ft.stages.dataset RUN_DIR

Reads `paths.raw_dataset` with the tokenizer of `paths.base_model`, and writes `paths.dataset_path`.
The same inputs give the same bytes with any number of processes.
"""

import gc
import os

if __name__ == "__main__":
    # Switch off what costs more time than it saves here; this must precede the imports.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's, for linear algebra
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # searched for in every installed package
    gc.set_threshold(50_000)  # a raw row makes many objects, none of them in a cycle

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hyperpod_ft import publish
from hyperpod_ft.checkpoint.formats import model_directory
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.config.sections.inputs import Dataset
from hyperpod_ft.data import context_check, packing, prepared, reading, tokenizer, workers
from hyperpod_ft.data.columns import LISTED
from hyperpod_ft.data.encoder import Encoder
from hyperpod_ft.data.inspection import examples as inspection
from hyperpod_ft.data.inspection import shown
from hyperpod_ft.data.packing import PackedRows, Packing
from hyperpod_ft.data.prepared import SplitName
from hyperpod_ft.data.reading import Chunk
from hyperpod_ft.data.report import ChatReport, DatasetReport, EndOfTurn, Lengths, RawRowCount
from hyperpod_ft.data.samples import Draw, SampleReader, draw_rows
from hyperpod_ft.data.seq2seq.packing import Seq2SeqPacking, Seq2SeqRows, fill_seq2seq, pack_seq2seq
from hyperpod_ft.data.tokenization import TOO_LONG, ChatCount, Tokens, TokenStream
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages.stage import Result, main

_PROGRESS_SECONDS = 5.0
_SHOWN = 10  # examples that the report shows token by token
_TOKENS_PER_BLOCK = 1 << 17  # written at once: a block that fits the processor's cache takes half the time

Fill = Callable[[int, int], PackedRows | Seq2SeqRows]
"""The arrays of rows `first` to `stop`."""


def work(run: Run) -> Result:
    dataset = run.config.dataset
    start = _decoder_start(run)
    encoder = Encoder.load(run.paths.base_model, chat=dataset.may_have_messages)
    chunks = reading.sliced(run.paths.raw_dataset, reading.chunks(run.paths.raw_dataset), dataset.split)
    run.paths.dataset_path.parent.mkdir(parents=True, exist_ok=True)
    stream = TokenStream(run.paths.dataset_path.parent)
    counts, origins = _tokenize(run.paths.raw_dataset, chunks, dataset, encoder, stream)
    counts.check(dataset)
    examples = stream.tokens()
    ends = _ends_of_turns(counts.chats.ends, run, encoder)
    drawn = draw_rows(origins, dataset.validation_share, run.config.seed)
    with publish.new_directory(run.paths.dataset_path) as directory:
        packings: dict[str, Packing | Seq2SeqPacking] = {}
        splits: dict[SplitName, NDArray[np.int64]] = {"train": drawn.train, "validation": drawn.validation}
        for name, chosen in splits.items():
            packings[name], fill = _pack(run.config, examples, chosen, encoder.pad, start)
            _write(directory, name, packings[name].row_count, dataset, fill)
        reader = SampleReader(run.paths.raw_dataset, chunks, origins, dataset, encoder)
        chats = _chat_report(counts.chats, ends, reader, examples, drawn) if dataset.format == "chat" else None
        report = _report(counts, examples, drawn, packings, dataset, encoder.unknown, chats)
        prepared.write_samples(directory, reader.samples(drawn))
        shown.write(directory, reader.shown(drawn.train[:_SHOWN]))
        prepared.write_report(directory, report.as_dict())
    for line in report.lines():
        print(line, flush=True)
    return Result([run.paths.dataset_path], report.as_dict())


def _tokenize(
    directory: Path, chunks: list[Chunk], dataset: Dataset, encoder: Encoder, stream: TokenStream
) -> tuple[RawRowCount, list[NDArray[np.int32]]]:
    """Add all tokens to `stream`. Returns the counts of raw rows and each chunk's `origins`."""
    counts, origins = RawRowCount(), []
    started = reported = time.monotonic()
    for number, part in enumerate(workers.tokenize_all(directory, chunks, dataset, encoder), 1):
        counts.add(part)
        origins.append(part.origins)
        stream.add(part.tokens)
        now = time.monotonic()
        if now - reported >= _PROGRESS_SECONDS or number == len(chunks):
            reported = now
            rate = counts.rows_read / max(now - started, 1e-9)
            print(
                f"tokenized {counts.rows_read:,} rows, {number / len(chunks):.0%} of the data, {rate:,.0f} rows/s",
                flush=True,
            )
    return counts, origins


def _pack(
    config: RunConfig, examples: Tokens, chosen: NDArray[np.int64], pad: int, decoder_start: int | None
) -> tuple[Packing | Seq2SeqPacking, Fill]:
    """Where the `chosen` examples lie in rows, and what makes the arrays of these rows.

    `decoder_start`: of an encoder-decoder, whose rows have two parts; None for other models.
    """
    dataset, seed, length = config.dataset, config.seed, config.dataset.max_length
    starts, lengths, ids = examples.starts, examples.lengths, examples.ids
    if decoder_start is None:
        packed = packing.pack(dataset.packing, starts, lengths, chosen, length, seed, dataset.documents_per_example)
        return packed, lambda first, stop: packing.fill(packed, ids, examples.trained, first, stop, length, pad)
    assert dataset.max_target_length is not None and dataset.packing != "wrapped"
    widths = length, dataset.max_target_length
    pairs = pack_seq2seq(dataset.packing, starts, lengths, examples.label_tokens, chosen, widths, seed)
    return pairs, lambda first, stop: fill_seq2seq(pairs, ids, first, stop, widths, pad, decoder_start)


def _write(directory: Path, name: SplitName, row_count: int, dataset: Dataset, fill: Fill) -> None:
    rows = max(1, _TOKENS_PER_BLOCK // (dataset.max_length + (dataset.max_target_length or 0)))
    blocks = (fill(first, stop) for first, stop in prepared.blocks_of(row_count, rows))
    prepared.write_split(directory, name, blocks, row_count)


def _decoder_start(run: Run) -> int | None:
    """The id that an encoder-decoder's decoder reads first; None for other models."""
    return (
        model_directory.decoder_start(model_directory.read_config(run.paths.base_model))
        if run.config.dataset.max_target_length
        else None
    )


def _ends_of_turns(ends: Mapping[int, int], run: Run, encoder: Encoder) -> list[EndOfTurn]:
    stops = {encoder.eos, *model_directory.stop_ids(run.paths.base_model)}
    return [
        EndOfTurn(token, str(encoder.decode([token])), count, token in stops) for token, count in sorted(ends.items())
    ]


def _chat_report(
    counts: ChatCount, ends: Sequence[EndOfTurn], reader: SampleReader, examples: Tokens, drawn: Draw
) -> ChatReport:
    """Raises UserError where a sampled conversation would be trained otherwise than it is served."""
    wanted = np.concatenate([drawn.train, drawn.validation])[: context_check.ROWS]
    assert reader.encoder.tokenizer is not None
    compared = 0
    sampled = []
    for number, (row, documents) in reader.examples(wanted).items():
        tokens = slice(examples.starts[number], examples.starts[number] + examples.lengths[number])
        ids, trained = examples.ids[tokens], examples.trained[tokens]
        compared += context_check.check(row, documents[0], reader.dataset, reader.encoder.tokenizer, ids, trained)
        sampled.append(inspection.shown(row.where, documents, reader.dataset, reader.encoder))
    return ChatReport(
        turns=counts.turns,
        unrolled=counts.unrolled,
        left_out=counts.left_out,
        loses_reasoning=counts.loses_reasoning,
        ends=tuple(ends),
        compared_examples=len(wanted),
        compared_turns=compared,
        compared_tokens=shown.tallies(sampled),
    )


def _report(
    counts: RawRowCount,
    examples: Tokens,
    drawn: Draw,
    packings: Mapping[str, Packing | Seq2SeqPacking],
    dataset: Dataset,
    unknown: int | None,
    chats: ChatReport | None,
) -> DatasetReport:
    unspelled = np.flatnonzero(examples.ids == unknown) if unknown is not None else np.empty(0, np.int64)
    documents = np.unique(np.searchsorted(examples.lengths.cumsum(), unspelled, side="right"))
    tokens, labels = len(examples.ids), int(examples.trained.sum())
    rows = {name: packed.row_count for name, packed in packings.items()}
    width, target_width = dataset.max_length, dataset.max_target_length
    in_rows = tokens - labels if target_width else tokens  # the others are in the decoder's part
    return DatasetReport(
        rows_read=counts.rows_read,
        rows_used=counts.rows_used,
        train_examples=len(drawn.train),
        validation_examples=len(drawn.validation),
        tokens=tokens,
        label_tokens=labels,
        train_rows=rows["train"],
        validation_rows=rows["validation"],
        padding_share=round(1 - in_rows / (sum(rows.values()) * width), 6),
        target_padding_share=round(1 - labels / (sum(rows.values()) * target_width), 6) if target_width else None,
        unknown_tokens=len(unspelled),
        unknown_in=len(np.unique(documents // dataset.documents_per_example)),
        unused_columns=tuple(sorted(counts.unused)[:LISTED]),
        truncated=counts.truncated,
        dropped=counts.bad[TOO_LONG] + counts.emptied,
        bad_rows=counts.bad.total(),
        bad_reasons=dict(counts.bad.most_common()),
        bad_listed=tuple(str(row) for row in counts.listed),
        lengths=Lengths.of(examples.lengths),
        chats=chats,
    )


if __name__ == "__main__":
    tokenizer.without_torch()
    main("dataset", work)
