"""The rows of a split: where its examples lie in them, and their arrays, a few rows at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hyperpod_ft.config.sections.data import Data
from hyperpod_ft.data import packing, prepared
from hyperpod_ft.data.mixing.mixture import Numbers
from hyperpod_ft.data.packing import PackedRows
from hyperpod_ft.data.seq2seq.packing import Seq2SeqRows, fill_seq2seq, pack_seq2seq
from hyperpod_ft.data.stored import packings as stored_packings
from hyperpod_ft.data.stored.packings import GROUP, Parts, StoredPackings
from hyperpod_ft.data.stored.token_stream import StoredTokens
from hyperpod_ft.data.tokens import Tokens

_TOKENS_PER_BLOCK = 1 << 17  # written at once: a block that fits the processor's cache takes half the time
_TOKENS_IN_MEMORY = 1 << 21  # read at once: the more, the fewer of the files' pages are read again


@dataclass(frozen=True)
class RowsOfExamples:
    """How examples become rows. `directory`: for temporary files.

    `decoder_start`: of an encoder-decoder, whose rows have two parts; None for other models.
    """

    examples: StoredTokens
    dataset: Data
    how: packing.How
    seed: int
    pad: int
    decoder_start: int | None
    directory: Path

    def packed(self, chosen: Numbers) -> StoredPackings:
        """Where the `chosen` examples lie in rows."""
        dataset = self.dataset
        found = StoredPackings(self.directory, pairs=self.decoder_start is not None)
        label_tokens = self.examples.label_tokens() if self.decoder_start is not None else None
        for group, (first, stop) in enumerate(prepared.blocks_of(len(chosen), GROUP)):
            starts, lengths = self.examples.spans(chosen[first:stop])
            if label_tokens is None:
                found.add((packing.pack(self.how, starts, lengths, dataset.max_length, self.seed, group),))
                continue
            assert dataset.max_target_length is not None and self.how != "wrapped"
            widths = dataset.max_length, dataset.max_target_length
            targets = label_tokens[chosen[first:stop]].ravel().astype(np.int64)
            found.add(pack_seq2seq(self.how, starts.ravel(), lengths.ravel(), targets, widths, self.seed, group))
        return found

    def blocks(self, packings: Sequence[StoredPackings]) -> Iterator[PackedRows | Seq2SeqRows]:
        """The arrays of a split's rows, a few rows at a time."""
        width = self.dataset.row_tokens
        for stored in stored_packings.blocks(packings, max(1, _TOKENS_IN_MEMORY // width)):
            found, tokens = stored_packings.in_memory(stored, self.examples)
            for first, stop in prepared.blocks_of(found[0].row_count, max(1, _TOKENS_PER_BLOCK // width)):
                yield self._filled(found, tokens, first, stop)

    def _filled(self, packed: Parts, tokens: Tokens, first: int, stop: int) -> PackedRows | Seq2SeqRows:
        """The arrays of rows `first` to `stop`, from a packing of these tokens."""
        dataset = self.dataset
        spans, *targets = packed
        if not targets:
            return packing.fill(spans, tokens.ids, tokens.trained, first, stop, dataset.max_length, self.pad)
        assert dataset.max_target_length is not None and self.decoder_start is not None
        widths = dataset.max_length, dataset.max_target_length
        return fill_seq2seq((spans, targets[0]), tokens.ids, first, stop, widths, self.pad, self.decoder_start)
