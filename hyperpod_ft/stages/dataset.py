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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hyperpod_ft import publish
from hyperpod_ft.checkpoint.formats import added_tokens
from hyperpod_ft.checkpoint.formats.model_directory import decoder_start, read_config
from hyperpod_ft.config.sections.data import Data
from hyperpod_ft.data import columns, context_check, packing, prepared, tokenizer
from hyperpod_ft.data.encoder import Encoder
from hyperpod_ft.data.images import stored as stored_images
from hyperpod_ft.data.images.reader import ImageReader, of_prompts
from hyperpod_ft.data.images.stored import ImageRow, ImageRows, StoringImages
from hyperpod_ft.data.inspection import shown
from hyperpod_ft.data.mixing import duplicates, mixture
from hyperpod_ft.data.mixing.counted import report_of, source_reports
from hyperpod_ft.data.mixing.mixture import Draw, Numbers
from hyperpod_ft.data.mixing.source_report import SourceReport
from hyperpod_ft.data.mixing.sources import ReadExample, TokenizedSource, each, read, tokenized
from hyperpod_ft.data.prepared import Prompt, Sample, SplitName
from hyperpod_ft.data.stored.packings import StoredPackings
from hyperpod_ft.data.stored.rows import RowsOfExamples
from hyperpod_ft.data.stored.token_stream import StoredTokens, TokenStream
from hyperpod_ft.data.text import rendering, run_prompts
from hyperpod_ft.data.text.example import Example
from hyperpod_ft.data.tokenization import RawRowCount
from hyperpod_ft.errors import UserError
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages.stage import Result, main

_SAMPLES_PER_SPLIT = 256
_PROMPTS_AT_ONCE = 1 << 16
_SHOWN = 10  # examples that the report shows token by token


def work(run: Run) -> Result:
    dataset = run.config.dataset
    start = _decoder_start(run)
    how = _packing_of(run)
    encoder = Encoder.load(run.paths.base_model, chat=dataset.may_have_messages, images=dataset.images)
    _check_encoder(run, encoder)
    rendering.fix_date()
    run.paths.dataset_path.parent.mkdir(parents=True, exist_ok=True)
    stream = TokenStream(run.paths.dataset_path.parent, dataset.documents_per_example)
    sources = _tokenized_sources(run, encoder, stream)
    counts = RawRowCount.total(source.counts for source in sources)
    counts.check(dataset)
    examples = stream.tokens()
    _print_new_tokens(run, examples)
    texts, kept = _texts(dataset, sources, examples)
    drawn = mixture.draw([source.examples(kept) for source in sources], dataset.validation_share, run.config.seed)
    _require_training(sources, drawn)
    drawn_for: dict[SplitName, Numbers] = {"train": drawn.train, "validation": mixture.mixed(drawn.validation)}
    desirable = stream.desirable.read(0, len(stream.desirable))
    place = run.paths.dataset_path.parent
    made = RowsOfExamples(examples, dataset, how, run.config.seed, encoder.pad, start, place)
    with publish.new_directory(run.paths.dataset_path) as directory:
        packings: dict[SplitName, list[StoredPackings]] = {
            "train": [made.packed(drawn.train)],
            # prompts have no validation loss
            "validation": [made.packed(chosen) for chosen in drawn.validation if dataset.has_answers],
        }
        rows = {name: sum(one.row_count for one in of_split) for name, of_split in packings.items()}
        for name, of_split in packings.items():
            prepared.write_split(directory, name, made.blocks(of_split), rows[name])
            if dataset.is_unpaired and rows[name]:
                prepared.write_labels(directory, name, desirable[drawn_for[name]])
        if not dataset.has_answers:
            prepared.write_prompts(directory, "train", _prompts(sources, drawn.train, encoder))
        storing = StoringImages(directory) if dataset.images else None
        for name, chosen in drawn_for.items():
            if storing:
                _write_image_rows(directory / name, chosen, sources, encoder, storing)
        splits = {name: chosen[:_SAMPLES_PER_SPLIT] for name, chosen in drawn_for.items()}
        found = read(sources, np.concatenate(list(splits.values())), encoder)
        of_sources: tuple[SourceReport, ...] = ()
        if dataset.mixes:
            held_out = [one.row_count for one in packings["validation"]] or [0] * len(sources)
            of_sources = source_reports(sources, examples, kept, drawn, held_out)
        report = report_of(counts, examples, drawn, rows, dataset, texts, of_sources)
        if dataset.is_unpaired:
            report = replace(report, desirable_examples=int(desirable[drawn.train].sum()))
        if "chat" in dataset.formats:
            in_chats = context_check.chat_report(counts.chats, run.paths.base_model, encoder, found, examples)
            report = replace(report, chats=in_chats)
        prepared.write_samples(directory, _samples(splits, found, directory if storing else None))
        if storing:
            report = replace(report, images=storing.close())
        shown.write(directory, [found[number].shown(encoder) for number in splits["train"][:_SHOWN].tolist()])
        prepared.write_report(directory, report.as_dict())
    for line in report.lines():
        print(line, flush=True)
    return Result([run.paths.dataset_path], report.as_dict() | {"packing": how})


def _texts(
    dataset: Data, sources: Sequence[TokenizedSource], examples: StoredTokens
) -> tuple[Numbers | None, NDArray[np.bool_]]:
    """A number for the text of each example (None if not needed), and which examples are kept."""
    count = sources[-1].stop
    kept = np.ones(count, np.bool_)
    if not (dataset.deduplicate or dataset.validates) or dataset.images:  # other images may have the same tokens
        return None, kept
    texts = duplicates.texts(examples.blocks(), dataset.documents_per_example)
    if dataset.deduplicate:
        validation_first = sorted(sources, key=lambda source: source.part.trains)
        kept = duplicates.first_of_each(texts, [(source.first, source.stop) for source in validation_first])
    return texts, kept


def _require_training(sources: Sequence[TokenizedSource], drawn: Draw) -> None:
    """Raises UserError for a source that is to be trained on and has nothing left, or when none has."""
    for source, available, taken in zip(sources, drawn.available, drawn.taken, strict=True):
        if (taken or not len(drawn.train)) and source.part.trains and not available:
            raise UserError(
                f"{source.part.key}: no example is left for training: all are also in other sources",
                "remove the source, or dataset.deduplicate",
            )


def _check_encoder(run: Run, encoder: Encoder) -> None:
    """Raises UserError for new tokens, or prompts of stage generate, that it cannot encode."""
    asked = run.config.dataset.questions
    if tokens := run.config.model.added_tokens:
        encoder.check_ids(added_tokens.numbered(run.paths.base_model, tokens).known)
    if encoder.tokenizer is not None and asked.format == "chat":
        images = of_prompts(encoder.images, run.paths.prompt_images)
        run_prompts.as_asked(run.config.generate.prompts, asked, encoder.tokenizer, chats=True, images=images)


def _tokenized_sources(run: Run, encoder: Encoder, stream: TokenStream) -> list[TokenizedSource]:
    """Raises UserError for a source without an example."""
    parts, sources = run.config.dataset.parts, list[TokenizedSource]()
    for part, directory in zip(parts, run.paths.raw_datasets, strict=True):
        first = sources[-1].stop if sources else 0
        sources.append(tokenized(part, directory, encoder, stream, first, named=len(parts) > 1))
    for source in sources:
        source.counts.require_some(source.part)
    return sources


def _packing_of(run: Run) -> packing.How:
    """How examples fill rows; where the model decides that against packing, a line says why."""
    if run.config.dataset.packing != "auto":
        return run.config.dataset.packing
    alone = not run.config.dataset.has_answers or run.config.dataset.images
    if alone or run.config.training.objective in ("kto", "reward"):
        return "none"
    certificate = run.journal.certificate()
    if not (certificate and certificate.not_packed):
        return "bfd"
    print(f"one example a row: {certificate.not_packed}", flush=True)
    return "none"


def _prompts(sources: Sequence[TokenizedSource], chosen: Numbers, encoder: Encoder) -> Iterator[Prompt]:
    """The text of prompts, and the columns beside them. Raises UserError for text among messages."""
    templated: bool | None = None
    for first, stop in prepared.blocks_of(len(chosen), _PROMPTS_AT_ONCE):
        part = chosen[first:stop]
        found = read(sources, part, encoder)
        for number in part.tolist():  # an epoch may have an example several times
            example, row, source = found[number].documents[0], found[number].row, found[number].source
            dataset = source.part.dataset
            used = {*dataset.ignored_columns, *(columns.used(dataset) if dataset.prompt_template is None else ())}
            beside = {name: value for name, value in row.values.items() if name not in used}
            where = f"{source.name}/{row.where}" if source.name else row.where
            templated = example.templated if templated is None else templated
            if example.templated != templated:
                kinds = ("chat messages", "text") if example.templated else ("text", "chat messages")
                raise UserError(f"{where}: the prompt is {kinds[0]}, others are {kinds[1]}", "write all prompts alike")
            yield Prompt(example.prompt, example.templated, beside, where)


def _write_image_rows(
    directory: Path, chosen: Numbers, sources: Sequence[TokenizedSource], encoder: Encoder, storing: StoringImages
) -> None:
    """The text of a split's rows, each an example, and their images."""
    as_written = replace(encoder, images=ImageReader(None))

    def row_of(example: Example) -> ImageRow:
        answer = example.segments[-1].text
        ends = encoder.backend.encode([answer]).ids[-1] in encoder.special_ids
        spans = storing.add(example.images)
        return ImageRow(example.prompt, answer if ends else answer + encoder.token(encoder.eos), spans)

    numbers, order = np.unique(chosen, return_inverse=True)  # an epoch may have an example several times
    if len(numbers):
        rows = (row_of(one.documents[0]) for _, one in each(sources, numbers, as_written))
        stored_images.write_rows(directory, rows, order)


def _print_new_tokens(run: Run, examples: StoredTokens) -> None:
    """How often each is in the data: one that is misspelled in the run file never is."""
    if not (tokens := run.config.model.added_tokens):
        return
    ids = added_tokens.numbered(run.paths.base_model, tokens).known
    for token, found in zip(ids, examples.occurrences(ids.values()), strict=True):
        print(f"new token {token!r}: {f'{found:,} times' if found else 'never, so it is not learned'}", flush=True)


def _decoder_start(run: Run) -> int | None:
    """The id that an encoder-decoder's decoder reads first; None for other models."""
    return decoder_start(read_config(run.paths.base_model)) if run.config.dataset.max_target_length else None


def _samples(
    splits: Mapping[SplitName, Numbers], found: Mapping[int, ReadExample], with_images: Path | None
) -> list[Sample]:
    """Those with a prompt, which a model can be asked; of preferences, the chosen or desirable documents.

    `with_images`: the prepared dataset whose rows, which begin with `splits`, have images.
    """
    samples = []
    for split, chosen in splits.items():
        rows = ImageRows(with_images / split) if with_images and len(chosen) else None
        numbers = chosen.tolist()
        for place, number in enumerate(numbers):
            example, again = found[number].documents[0], number in numbers[:place]  # in one epoch
            if example.prompt.strip() and example.desirable is not False and not again:
                images = rows.row(place).images if rows else ()
                samples.append(Sample.of(split, example, found[number].source.name, images))
    return samples


if __name__ == "__main__":
    tokenizer.without_torch()
    main("dataset", work)
