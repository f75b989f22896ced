"""Stage `dataset`: tokenize the raw rows and pack them into rows of equal length, once, on CPUs.

python -m hyperpod_ft.stages.dataset RUN_DIR

Reads `paths.raw_datasets` with the tokenizer of `paths.base_model`, and writes `paths.dataset_path`.
The same inputs give the same bytes with any number of processes.
"""

import gc
import os

if __name__ == "__main__":
    # Switch off what costs more time than it saves here; this must precede the imports.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's, for linear algebra
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # searched for in every installed package
    gc.set_threshold(50_000)  # a raw row makes many objects, none of them in a cycle

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hyperpod_ft import publish
from hyperpod_ft.checkpoint.formats.model_directory import decoder_start, read_config
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.config.sections.data import Data
from hyperpod_ft.data import context_check, packing, prepared, tokenizer
from hyperpod_ft.data.columns import LISTED
from hyperpod_ft.data.encoder import Encoder
from hyperpod_ft.data.inspection import shown
from hyperpod_ft.data.mixing import duplicates, mixture
from hyperpod_ft.data.mixing.mixture import Draw
from hyperpod_ft.data.mixing.source_report import SourceReport
from hyperpod_ft.data.mixing.sources import ReadExample, Source, read, tokenized
from hyperpod_ft.data.packing import PackedRows, Packing, merged
from hyperpod_ft.data.prepared import Sample, SplitName
from hyperpod_ft.data.report import DatasetReport, Lengths, RawRowCount
from hyperpod_ft.data.seq2seq.packing import (
    Seq2SeqPacking,
    Seq2SeqRows,
    fill_seq2seq,
    merged_seq2seq,
    pack_seq2seq,
)
from hyperpod_ft.data.text import rendering
from hyperpod_ft.data.tokenization import TOO_LONG, Tokens, TokenStream
from hyperpod_ft.errors import UserError
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages.stage import Result, main

_TOKENS_PER_BLOCK = 1 << 17  # written at once: a block that fits the processor's cache takes half the time
_SAMPLES_PER_SPLIT = 256
_SHOWN = 10  # examples that the report shows token by token

Fill = Callable[[int, int], PackedRows | Seq2SeqRows]
"""The arrays of rows `first` to `stop`."""
AnyPacking = Packing | Seq2SeqPacking


def work(run: Run) -> Result:
    dataset = run.config.dataset
    start = _decoder_start(run)
    encoder = Encoder.load(run.paths.base_model, chat=dataset.may_have_messages)
    rendering.fix_date()
    run.paths.dataset_path.parent.mkdir(parents=True, exist_ok=True)
    stream = TokenStream(run.paths.dataset_path.parent)
    sources: list[Source] = []
    for part, directory in zip(dataset.parts, run.paths.raw_datasets, strict=True):
        first = sources[-1].stop if sources else 0
        sources.append(tokenized(part, directory, encoder, stream, first, named=len(dataset.parts) > 1))
    for source in sources:
        source.counts.require_some(source.part)
    counts = RawRowCount.total(source.counts for source in sources)
    counts.check(dataset)
    examples = stream.tokens()
    texts, kept = _texts(dataset, sources, examples)
    drawn = mixture.draw([source.examples(kept) for source in sources], dataset.validation_share, run.config.seed)
    _require_training(sources, drawn)
    with publish.new_directory(run.paths.dataset_path) as directory:
        train = _pack(run.config, examples, drawn.train, start)
        validation = [_pack(run.config, examples, chosen, start) for chosen in drawn.validation]
        packings: dict[SplitName, AnyPacking] = {"train": train, "validation": _merged(validation)}
        for name, packed in packings.items():
            fill = _filling(run.config, packed, examples, encoder.pad, start)
            _write(directory, name, packed.row_count, dataset, fill)
        splits: dict[SplitName, NDArray[np.int64]] = {
            "train": drawn.train[:_SAMPLES_PER_SPLIT],
            "validation": mixture.mixed(drawn.validation)[:_SAMPLES_PER_SPLIT],
        }
        found = read(sources, np.concatenate(list(splits.values())), encoder)
        of_sources = _source_reports(dataset, sources, examples, kept, drawn, validation) if dataset.mixes else ()
        report = _report(counts, examples, drawn, packings, dataset, encoder.unknown, texts, of_sources)
        if "chat" in dataset.formats:
            drawn_order = {number: found[number] for chosen in splits.values() for number in chosen.tolist()}
            chats = context_check.chat_report(counts.chats, run.paths.base_model, encoder, drawn_order, examples)
            report = replace(report, chats=chats)
        prepared.write_samples(directory, _samples(splits, found))
        shown.write(directory, [found[number].shown(encoder) for number in splits["train"][:_SHOWN].tolist()])
        prepared.write_report(directory, report.as_dict())
    for line in report.lines():
        print(line, flush=True)
    return Result([run.paths.dataset_path], report.as_dict())


def _texts(
    dataset: Data, sources: Sequence[Source], examples: Tokens
) -> tuple[NDArray[np.int64] | None, NDArray[np.bool_]]:
    """The number of each example's text, None where nobody asks, and which examples are kept."""
    count = sources[-1].stop
    kept = np.ones(count, np.bool_)
    if not (dataset.deduplicate or dataset.validates):
        return None, kept
    texts = duplicates.texts(examples, dataset.documents_per_example)
    if dataset.deduplicate:
        validation_first = sorted(sources, key=lambda source: source.part.trains)
        order = np.concatenate([np.arange(source.first, source.stop) for source in validation_first])
        kept = duplicates.first_of_each(texts, order)
    return texts, kept


def _require_training(sources: Sequence[Source], drawn: Draw) -> None:
    """Raises UserError for a source that is to be trained on and has nothing left, or when none has."""
    for source, available, taken in zip(sources, drawn.available, drawn.taken, strict=True):
        if (taken or not len(drawn.train)) and source.part.trains and not available:
            raise UserError(
                f"{source.part.key}: no example is left for training: all are also in other sources",
                "remove the source, or dataset.deduplicate",
            )


def _pack(config: RunConfig, examples: Tokens, chosen: NDArray[np.int64], decoder_start: int | None) -> AnyPacking:
    """Where the `chosen` examples lie in rows.

    `decoder_start`: of an encoder-decoder, whose rows have two parts; None for other models.
    """
    dataset, seed, length = config.dataset, config.seed, config.dataset.max_length
    starts, lengths = examples.starts, examples.lengths
    if decoder_start is None:
        return packing.pack(dataset.packing, starts, lengths, chosen, length, seed, dataset.documents_per_example)
    assert dataset.max_target_length is not None and dataset.packing != "wrapped"
    widths = length, dataset.max_target_length
    return pack_seq2seq(dataset.packing, starts, lengths, examples.label_tokens, chosen, widths, seed)


def _merged(packings: Sequence[AnyPacking]) -> AnyPacking:
    pairs = [packed for packed in packings if isinstance(packed, Seq2SeqPacking)]
    return merged_seq2seq(pairs) if pairs else merged([one for one in packings if isinstance(one, Packing)])


def _filling(config: RunConfig, packed: AnyPacking, examples: Tokens, pad: int, decoder_start: int | None) -> Fill:
    """What makes the arrays of packed rows."""
    dataset, ids = config.dataset, examples.ids
    if isinstance(packed, Packing):
        return lambda first, stop: packing.fill(packed, ids, examples.trained, first, stop, dataset.max_length, pad)
    assert dataset.max_target_length is not None and decoder_start is not None
    widths = dataset.max_length, dataset.max_target_length
    return lambda first, stop: fill_seq2seq(packed, ids, first, stop, widths, pad, decoder_start)


def _write(directory: Path, name: SplitName, row_count: int, dataset: Data, fill: Fill) -> None:
    rows = max(1, _TOKENS_PER_BLOCK // (dataset.max_length + (dataset.max_target_length or 0)))
    blocks = (fill(first, stop) for first, stop in prepared.blocks_of(row_count, rows))
    prepared.write_split(directory, name, blocks, row_count)


def _decoder_start(run: Run) -> int | None:
    """The id that an encoder-decoder's decoder reads first; None for other models."""
    return decoder_start(read_config(run.paths.base_model)) if run.config.dataset.max_target_length else None


def _samples(splits: Mapping[SplitName, NDArray[np.int64]], found: Mapping[int, ReadExample]) -> list[Sample]:
    """Those with a prompt, which a model can be asked; of preferences, the chosen documents."""
    return [
        Sample.of(split, found[number].documents[0], found[number].source.name)
        for split, chosen in splits.items()
        for number in dict.fromkeys(chosen.tolist())  # an epoch may have an example several times
        if found[number].documents[0].prompt.strip()
    ]


def _source_reports(
    dataset: Data,
    sources: Sequence[Source],
    examples: Tokens,
    kept: NDArray[np.bool_],
    drawn: Draw,
    validation: Sequence[AnyPacking],
) -> tuple[SourceReport, ...]:
    lengths = examples.lengths.reshape(-1, dataset.documents_per_example).sum(1)
    reports = []
    for number, source in enumerate(sources):
        of_source = (drawn.train >= source.first) & (drawn.train < source.stop)
        reports.append(
            SourceReport(
                name=source.part.name,
                rows_read=source.counts.rows_read,
                rows_used=source.counts.rows_used,
                bad_rows=source.counts.bad.total(),
                duplicates=int((~kept[source.first : source.stop]).sum()),
                examples=drawn.available[number],
                train_examples=drawn.taken[number],
                train_tokens=int(lengths[drawn.train[of_source]].sum()),
                validation_examples=len(drawn.validation[number]),
                validation_rows=validation[number].row_count,
            )
        )
    return tuple(reports)


def _report(
    counts: RawRowCount,
    examples: Tokens,
    drawn: Draw,
    packings: dict[SplitName, AnyPacking],
    dataset: Data,
    unknown: int | None,
    texts: NDArray[np.int64] | None,
    sources: tuple[SourceReport, ...],
) -> DatasetReport:
    unspelled = np.flatnonzero(examples.ids == unknown) if unknown is not None else np.empty(0, np.int64)
    documents = np.unique(np.searchsorted(examples.lengths.cumsum(), unspelled, side="right"))
    validation = np.concatenate(drawn.validation)
    chosen, shape = np.concatenate([drawn.train, validation]), (-1, dataset.documents_per_example)
    lengths = examples.lengths.reshape(shape)[chosen].ravel()
    tokens, labels = int(lengths.sum()), int(examples.label_tokens.reshape(shape)[chosen].sum())
    rows = {name: packed.row_count for name, packed in packings.items()}
    width, target_width = dataset.max_length, dataset.max_target_length
    in_rows = tokens - labels if target_width else tokens  # the others are in the decoder's part
    return DatasetReport(
        rows_read=counts.rows_read,
        rows_used=counts.rows_used,
        train_examples=len(drawn.train),
        validation_examples=len(validation),
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
        lengths=Lengths.of(lengths),
        validation_in_training=0 if texts is None else int(np.isin(texts[validation], texts[drawn.train]).sum()),
        sources=sources,
    )


if __name__ == "__main__":
    tokenizer.without_torch()
    main("dataset", work)
