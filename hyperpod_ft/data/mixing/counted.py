"""What a prepared dataset consists of, counted for its report."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from hyperpod_ft.config.sections.data import Data
from hyperpod_ft.data import prepared
from hyperpod_ft.data.columns import LISTED
from hyperpod_ft.data.fitting import TOO_LONG
from hyperpod_ft.data.mixing import duplicates
from hyperpod_ft.data.mixing.mixture import Draw, Numbers
from hyperpod_ft.data.mixing.source_report import SourceReport
from hyperpod_ft.data.mixing.sources import TokenizedSource
from hyperpod_ft.data.prepared import SplitName
from hyperpod_ft.data.report import DatasetReport, Lengths
from hyperpod_ft.data.stored.token_stream import StoredTokens
from hyperpod_ft.data.tokenization import RawRowCount

_COUNTED = 1 << 16  # examples whose tokens are counted at once


def source_reports(
    sources: Sequence[TokenizedSource],
    examples: StoredTokens,
    kept: NDArray[np.bool_],
    drawn: Draw,
    validation_rows: Sequence[int],
) -> tuple[SourceReport, ...]:
    tokens = np.zeros(len(sources), np.int64)
    for first, stop in prepared.blocks_of(len(drawn.train), _COUNTED):
        chosen = drawn.train[first:stop]
        source_of = np.searchsorted([source.stop for source in sources], chosen, side="right")
        np.add.at(tokens, source_of, examples.spans(chosen)[1].sum(1))
    reports = []
    for number, source in enumerate(sources):
        reports.append(
            SourceReport(
                name=source.part.name,
                rows_read=source.counts.rows_read,
                rows_used=source.counts.rows_used,
                bad_rows=source.counts.bad.total(),
                duplicates=int((~kept[source.first : source.stop]).sum()),
                examples=drawn.available[number],
                train_examples=drawn.taken[number],
                train_tokens=int(tokens[number]),
                validation_examples=len(drawn.validation[number]),
                validation_rows=validation_rows[number],
            )
        )
    return tuple(reports)


def report_of(
    counts: RawRowCount,
    examples: StoredTokens,
    drawn: Draw,
    rows: Mapping[SplitName, int],
    dataset: Data,
    texts: Numbers | None,
    sources: tuple[SourceReport, ...],
) -> DatasetReport:
    label_tokens, labels = examples.label_tokens(), 0
    lengths: Counter[int] = Counter()
    for split in (drawn.train, *drawn.validation):
        for first, stop in prepared.blocks_of(len(split), _COUNTED):
            found, times = np.unique(examples.spans(split[first:stop])[1], return_counts=True)
            lengths.update(dict(zip(found.tolist(), times.tolist(), strict=True)))
            labels += int(label_tokens[split[first:stop]].sum())
    tokens = sum(length * times for length, times in lengths.items())
    validation = np.concatenate(drawn.validation)
    width, target_width = dataset.max_length, dataset.max_target_length
    in_rows = tokens - labels if target_width else tokens  # the others are in the decoder's part
    repeated = None if dataset.images else 0
    if texts is not None:
        repeated = duplicates.in_both(texts, validation, drawn.train)
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
        unknown_tokens=counts.unknown_tokens,
        unknown_in=counts.unknown_in,
        unused_columns=tuple(sorted(counts.unused)[:LISTED]),
        truncated=counts.truncated,
        dropped=counts.bad[TOO_LONG] + counts.emptied,
        bad_rows=counts.bad.total(),
        bad_reasons=dict(counts.bad.most_common()),
        bad_listed=tuple(str(row) for row in counts.listed),
        lengths=Lengths.of(lengths),
        validation_in_training=repeated,
        sources=sources,
    )
