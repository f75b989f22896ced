"""Stage generate: let the base and the tuned model answer the same prompts, and compare answers and losses.

python -m hyperpod_ft.stages.generate RUN_DIR
"""

from hyperpod_ft import gc_pause

if __name__ == "__main__":
    gc_pause.pause_collection()

import gc
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from hyperpod_ft.checkpoint.formats import pretrained
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.data import tokenizer as tokenizers
from hyperpod_ft.data.images.previews import previews
from hyperpod_ft.data.images.reader import ImageReader, of_prompts
from hyperpod_ft.data.packing import PackedRows
from hyperpod_ft.data.prepared import PreparedDataset
from hyperpod_ft.data.seq2seq.packing import Seq2SeqRows
from hyperpod_ft.data.text import run_prompts
from hyperpod_ft.data.tokenizer import Tokenizer
from hyperpod_ft.errors import UserError
from hyperpod_ft.evaluation import rouge
from hyperpod_ft.evaluation.answers import as_text, found_in
from hyperpod_ft.evaluation.greedy import GreedyAnswer, answers
from hyperpod_ft.evaluation.loss import (
    DocumentLosses,
    batches_loss,
    document_losses,
    mean_loss,
    over_all,
    preference_losses,
    source_losses,
)
from hyperpod_ft.job.tracking import publishing_metrics
from hyperpod_ft.runs.results.samples import (
    SPLITS,
    Loss,
    Losses,
    RecordedAnswers,
    RougeScores,
    SampledRow,
    Samples,
    ShownImage,
    Split,
)
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages.stage import Result, main

# Bounds the time that both losses take; the report says how many of how many rows were used.
_VALIDATION_ROWS = 256


@dataclass(frozen=True)
class _Question:
    origin: Literal["prompts", "train", "validation"]
    text: str
    ids: Sequence[int]
    expected: str = ""  # of a sample: its completion
    templated: bool = False  # written by a chat template
    images: Sequence[bytes] = ()
    image_names: Sequence[str] = ()


@dataclass(frozen=True)
class _ModelAnswers:
    """Answers and validation loss of one model; of preferences, the losses of all documents."""

    answers: list[GreedyAnswer]
    loss: Loss | None = None
    source_losses: Mapping[str, Loss] = field(default_factory=dict)  # of several sources, by name
    documents: DocumentLosses | None = None


def work(run: Run) -> Result:
    # silences warnings about the @ in names of model directories, and about sampling settings, unused in greedy answers
    transformers_logging.set_verbosity_error()
    tokenizer = tokenizers.load(run.paths.tuned_model)
    prepared = PreparedDataset.open(run.paths.dataset_path)
    reader = ImageReader.load(run.paths.tuned_model) if run.config.dataset.images else None
    questions = _questions(run, prepared, tokenizer, reader)
    if not questions:
        print("generate: no prompts and no samples; comparing only the losses", flush=True)
    # the loss of kto depends on which completions are in a batch
    validation = None if run.config.training.objective == "kto" else prepared.split("validation")
    # one after the other, so that only one is in memory
    sources = prepared.validation_sources()
    shown = _Shown(reader, questions, prepared.directory / "validation") if reader else None
    base, tuned = (
        _ask(run.config, model, tokenizer, questions, validation, sources, shown)
        for model in (run.paths.base_model, run.paths.tuned_model)
    )
    samples = _samples(run.config, questions, base, tuned)
    print(as_text(samples), flush=True)
    if samples.unchanged:
        raise UserError(
            f"{run.paths.tuned_model}: gives the same answers to all {len(questions)} prompts, and has the same"
            " validation loss, as the base model",
            "train longer, or with a higher training.learning_rate",
        )
    if questions and not samples.answers_changed:
        print(f"generate: both models give the same answers to all {len(questions)} prompts", flush=True)
    samples.write(run.paths.samples_path)
    return Result((run.paths.samples_path,), samples.summary())


class _Shown:
    """What models get for questions, and for validation rows, with images."""

    def __init__(self, reader: ImageReader, questions: Sequence[_Question], validation: Path) -> None:
        self._reader, self._questions, self._validation = reader, questions, validation

    def inputs(self, numbers: Sequence[int]) -> dict[str, torch.Tensor]:
        asked = [self._questions[number] for number in numbers]
        return self._reader.inputs([one.text for one in asked], [one.images for one in asked])

    def loss(self, model: PreTrainedModel, rows: NDArray[np.int64]) -> Loss | None:
        """That of these rows, or of the first of them if there are many."""
        from hyperpod_ft.engines.trl.images import ImageBatches  # noqa: PLC0415 - of this engine's environment only

        batches, chosen = ImageBatches(self._validation, self._reader), rows[rows < _VALIDATION_ROWS].tolist()
        return batches_loss(model, (batches.of([row]) for row in chosen), len(chosen), len(rows))


def _questions(
    run: Run, prepared: PreparedDataset, tokenizer: Tokenizer, reader: ImageReader | None
) -> list[_Question]:
    config, wanted = run.config, run.config.generate
    encoder_decoder = config.dataset.max_target_length is not None
    asked = config.dataset.questions
    formats_of = {part.name: part.dataset.format for part in config.dataset.parts}
    chats = run_prompts.are_chats(asked, prepared.samples("train"))

    def ids_of(text: str, images: Sequence[bytes], *, chat: bool) -> list[int]:
        if reader:
            return reader.ids(text, images)
        if encoder_decoder:
            return tokenizers.source_ids(tokenizer, text)
        return tokenizers.prompt_ids(tokenizer, text, chat=chat)

    questions = []
    images = of_prompts(reader, run.paths.prompt_images)
    for one in run_prompts.as_asked(wanted.prompts, asked, tokenizer, chats=chats, images=images):
        ids = ids_of(one.text, one.images, chat=one.templated)
        questions.append(_Question("prompts", one.text, ids, "", one.templated, one.images, one.image_names))
    splits: tuple[tuple[Literal["train", "validation"], int], ...] = (
        ("train", wanted.train_samples),
        ("validation", wanted.validation_samples),
    )
    for split, count in splits:
        for sample in prepared.samples(split)[:count]:
            files = prepared.images(sample)
            ids = ids_of(sample.prompt, files, chat=sample.templated)
            expected = sample.completion
            if formats_of.get(sample.source, asked.format) == "text":  # as much of the rest as an answer can be
                expected = tokenizers.beginning(tokenizer, expected, wanted.max_new_tokens)
            origin = split if config.dataset.has_answers else "prompts"
            questions.append(
                _Question(origin, sample.prompt, ids, expected, sample.templated, files, sample.image_names)
            )
    if empty := [question for question in questions if not question.text.strip()]:
        raise UserError(f"generate: a prompt from {empty[0].origin} is empty", "write a prompt with text")
    return questions


def _ask(
    config: RunConfig,
    directory: Path,
    tokenizer: Tokenizer,
    questions: Sequence[_Question],
    validation: PackedRows | Seq2SeqRows | None,
    sources: Mapping[str, NDArray[np.int64]],
    shown: _Shown | None,
) -> _ModelAnswers:
    model = _load(directory, _device(config))
    ids, inputs_of = [question.ids for question in questions], shown.inputs if shown else None
    found = answers(model, tokenizer, ids, config.generate.max_new_tokens, inputs_of)
    result = _ModelAnswers(found)
    if isinstance(validation, PackedRows) and config.training.objective == "dpo":
        result = replace(result, documents=document_losses(model, validation, _VALIDATION_ROWS))
    elif validation is not None and shown:
        of_parts = sources or {"": np.arange(len(validation))}
        losses = {name: loss for name, rows in of_parts.items() if (loss := shown.loss(model, rows))}
        result = replace(result, loss=over_all(losses.values()), source_losses=losses if sources else {})
    elif validation is not None and sources:
        losses = source_losses(model, validation, _VALIDATION_ROWS, sources)
        result = replace(result, loss=over_all(losses.values()), source_losses=losses)
    elif validation is not None:
        result = replace(result, loss=mean_loss(model, validation, _VALIDATION_ROWS))
    del model
    gc.collect()
    return result


def _samples(config: RunConfig, questions: Sequence[_Question], base: _ModelAnswers, tuned: _ModelAnswers) -> Samples:
    prompts, sampled, changed = [], [], 0
    pattern = config.generate.answer_pattern
    find = partial(found_in, re.compile(pattern)) if pattern else None
    images = _shown_images(questions)
    for question, shown, one, other in zip(questions, images, base.answers, tuned.answers, strict=True):
        recorded = RecordedAnswers(question.text, question.templated, one.text, other.text, shown)
        if question.origin == "prompts":
            prompts.append(recorded)
        else:
            sampled.append(SampledRow.of(question.origin, recorded, question.expected, find))
        changed += one.ids != other.ids
    of_sources = {name: Losses(loss, tuned.source_losses[name]) for name, loss in base.source_losses.items()}
    scores = _rouge(sampled) if config.scores_rouge else {}
    samples = Samples.of(prompts, sampled, changed, _losses(config, base, tuned), of_sources, scores)
    if find and sampled and not any(count.rows for count in samples.pattern_match.values()):
        print(f"generate: answer_pattern {pattern!r} matches none of the {len(sampled)} expected answers", flush=True)
    return samples


def _rouge(samples: Sequence[SampledRow]) -> dict[Split, RougeScores]:
    found = {}
    for split in SPLITS:
        rows = [row for row in samples if row.split == split]
        if rows:
            base = rouge.mean([(row.base, row.expected) for row in rows])
            found[split] = RougeScores(len(rows), base, rouge.mean([(row.tuned, row.expected) for row in rows]))
    return found


def _shown_images(questions: Sequence[_Question]) -> list[tuple[ShownImage, ...]]:
    """Those of each question; of held-out rows first, since not all may have room."""
    order = sorted(range(len(questions)), key=lambda number: questions[number].origin == "train")
    made = iter(previews(image for number in order for image in questions[number].images))
    found = {number: tuple(ShownImage(name, next(made)) for name in questions[number].image_names) for number in order}
    return [found[number] for number in range(len(questions))]


def _losses(config: RunConfig, base: _ModelAnswers, tuned: _ModelAnswers) -> Losses | None:
    if base.documents and tuned.documents:
        return Losses(*preference_losses(base.documents, tuned.documents, config.dpo))
    return Losses(base.loss, tuned.loss) if base.loss and tuned.loss else None


def _load(directory: Path, device: torch.device) -> PreTrainedModel:
    print(f"generate: {directory} on {device}", flush=True)
    # config.json has the dtype of the stored weights
    model = pretrained.load(directory, "auto")
    model.to(device)  # type: ignore[arg-type]  # transformers' wrapper loses the signature
    model.eval()
    return model


def _device(config: RunConfig) -> torch.device:
    wanted = config.instance.device
    found = torch.accelerator.current_accelerator()
    if found is not None and found.type == wanted:
        return found
    if wanted != "cpu":
        print(f"generate: torch finds no {wanted} device on this node; using the CPU", flush=True)
    return torch.device("cpu")


if __name__ == "__main__":
    gc_pause.resume_collection()
    main("generate", work)
    run = Run.open(Path(sys.argv[1]))
    if run.config.env.container is None:  # else the script publishes, outside
        with publishing_metrics(run):
            pass  # the exact answers, which only this stage knows
