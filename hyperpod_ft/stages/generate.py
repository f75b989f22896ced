"""Stage generate: let the base and the tuned model answer the same prompts, and compare answers and losses.

python -m hyperpod_ft.stages.generate RUN_DIR
"""

from hyperpod_ft import gc_pause

if __name__ == "__main__":
    gc_pause.pause_collection()

import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from hyperpod_ft.config.sections.dataset import Dataset
from hyperpod_ft.data import tokenizer as tokenizers
from hyperpod_ft.data.packing import PackedRows
from hyperpod_ft.data.prepared import PreparedDataset
from hyperpod_ft.data.seq2seq.packing import Seq2SeqRows
from hyperpod_ft.data.text import formats
from hyperpod_ft.data.text.prompts import is_chat
from hyperpod_ft.data.tokenizer import Tokenizer
from hyperpod_ft.errors import UserError
from hyperpod_ft.evaluation import pretrained
from hyperpod_ft.evaluation.comparison import as_text
from hyperpod_ft.evaluation.greedy import GreedyAnswer, answers
from hyperpod_ft.evaluation.loss import DocumentLosses, document_losses, mean_loss, preference_losses
from hyperpod_ft.job.tracking import publishing_metrics
from hyperpod_ft.runs.results.samples import Loss, Losses, RecordedAnswers, SampledRow, Samples
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


@dataclass(frozen=True)
class _ModelAnswers:
    """Answers and validation loss of one model; of preferences, the losses of all documents."""

    answers: list[GreedyAnswer]
    loss: Loss | None = None
    documents: DocumentLosses | None = None


def work(run: Run) -> Result:
    # silences warnings about the @ in names of model directories, and about sampling settings, unused in greedy answers
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    tokenizer = tokenizers.load(run.tuned_model)
    prepared = PreparedDataset.open(run.dataset_path)
    questions = _questions(run, prepared, tokenizer)
    if not questions:
        print("generate: no prompts and no samples; comparing only the losses", flush=True)
    validation = prepared.split("validation")
    # one after the other, so that only one is in memory
    base = _ask(run, run.base_model, tokenizer, questions, validation)
    tuned = _ask(run, run.tuned_model, tokenizer, questions, validation)
    samples = _samples(questions, base, tuned, _losses(run, base, tuned))
    print(as_text(samples), flush=True)
    if samples.unchanged:
        raise UserError(
            f"{run.tuned_model}: gives the same answers to all {len(questions)} prompts, and has the same validation"
            " loss, as the base model",
            "train longer, or with a higher training.learning_rate",
        )
    if questions and not samples.answers_changed:
        print(f"generate: both models give the same answers to all {len(questions)} prompts", flush=True)
    samples.write(run.samples_path)
    return Result((run.samples_path,), samples.summary())


def _questions(run: Run, prepared: PreparedDataset, tokenizer: Tokenizer) -> list[_Question]:
    wanted = run.config.generate
    encoder_decoder = run.config.dataset.max_target_length is not None
    given_as = run.config.dataset.format
    chat = given_as == "chat"
    # the raw rows of preferences may be texts or chats
    chats = chat or (given_as == "preference" and any(sample.templated for sample in prepared.samples("train")))

    def ids_of(text: str, *, chat: bool) -> list[int]:
        if encoder_decoder:
            return tokenizers.source_ids(tokenizer, text)
        return tokenizers.prompt_ids(tokenizer, text, chat=chat)

    questions = []
    for number, given in enumerate(wanted.prompts):
        prompt = _as_chat(run.config.dataset, given) if chats else given
        if isinstance(prompt, str):
            questions.append(_Question("prompts", prompt, ids_of(prompt, chat=False)))
            continue
        try:
            text = formats.prompt_of(run.config.dataset, prompt, tokenizer)
        except UserError as error:
            raise UserError(f"generate.prompts.{number}: {error}", "write it as a row of the dataset") from error
        templated = is_chat(run.config.dataset, prompt)
        questions.append(_Question("prompts", text, ids_of(text, chat=templated), templated=templated))
    splits: tuple[tuple[Literal["train", "validation"], int], ...] = (
        ("train", wanted.train_samples),
        ("validation", wanted.validation_samples),
    )
    for split, count in splits:
        for sample in prepared.samples(split)[:count]:
            # earlier versions prepared samples that do not say it
            templated = chat or sample.templated
            ids = ids_of(sample.prompt, chat=templated)
            questions.append(_Question(split, sample.prompt, ids, sample.completion, templated))
    if empty := [question for question in questions if not question.ids]:
        raise UserError(f"generate: a prompt from {empty[0].origin} has no tokens", "write a prompt with text")
    return questions


def _as_chat(dataset: Dataset, prompt: str | dict[str, Any]) -> dict[str, Any]:
    """A prompt for raw rows that are chats: a string is the user's message."""
    key = "messages" if dataset.format == "chat" else "prompt"
    row = {key: prompt} if isinstance(prompt, str) else prompt
    if isinstance(row.get(key), str):
        return row | {key: [{"role": "user", "content": row[key]}]}
    return row


def _ask(
    run: Run,
    directory: Path,
    tokenizer: Tokenizer,
    questions: Sequence[_Question],
    validation: PackedRows | Seq2SeqRows | None,
) -> _ModelAnswers:
    model = _load(directory, _device(run))
    found = answers(model, tokenizer, [question.ids for question in questions], run.config.generate.max_new_tokens)
    result = _ModelAnswers(found)
    if isinstance(validation, PackedRows) and run.config.training.objective == "dpo":
        result = replace(result, documents=document_losses(model, validation, _VALIDATION_ROWS))
    elif validation is not None:
        result = replace(result, loss=mean_loss(model, validation, _VALIDATION_ROWS))
    del model
    gc.collect()
    return result


def _samples(
    questions: Sequence[_Question], base: _ModelAnswers, tuned: _ModelAnswers, losses: Losses | None
) -> Samples:
    prompts, sampled, changed = [], [], 0
    for question, one, other in zip(questions, base.answers, tuned.answers, strict=True):
        recorded = RecordedAnswers(question.text, question.templated, one.text, other.text)
        if question.origin == "prompts":
            prompts.append(recorded)
        else:
            sampled.append(SampledRow.of(question.origin, recorded, question.expected))
        changed += one.ids != other.ids
    return Samples.of(prompts, sampled, changed, losses)


def _losses(run: Run, base: _ModelAnswers, tuned: _ModelAnswers) -> Losses | None:
    if base.documents and tuned.documents:
        return Losses(*preference_losses(base.documents, tuned.documents, run.config.dpo))
    return Losses(base.loss, tuned.loss) if base.loss and tuned.loss else None


def _load(directory: Path, device: torch.device) -> PreTrainedModel:
    print(f"generate: {directory} on {device}", flush=True)
    # config.json has the dtype of the stored weights
    model = pretrained.load(directory, "auto")
    model.to(device)  # type: ignore[arg-type]  # transformers' wrapper loses the signature
    model.eval()  # type: ignore[no-untyped-call]
    return model


def _device(run: Run) -> torch.device:
    wanted = run.config.instance.device
    found = torch.accelerator.current_accelerator()
    if found is not None and found.type == wanted:
        return found
    if wanted != "cpu":
        print(f"generate: torch finds no {wanted} device on this node; using the CPU", flush=True)
    return torch.device("cpu")


if __name__ == "__main__":
    gc_pause.resume_collection()
    main("generate", work)
    with publishing_metrics(Run.open(Path(sys.argv[1]))):
        pass  # the exact answers, which only this stage knows
