"""Stage consolidate: make a PEFT adapter, or with method full the final model, of a training's last or best checkpoint.

python -m hyperpod_ft.stages.consolidate RUN_DIR
"""

from pathlib import Path

from hyperpod_ft.checkpoint.consolidate import consolidate_adapters, consolidate_model
from hyperpod_ft.checkpoint.formats import checksums
from hyperpod_ft.checkpoint.sharded.sharded import open_checkpoint
from hyperpod_ft.data import chat_template, tokenizer
from hyperpod_ft.engines import checkpoint_directory
from hyperpod_ft.errors import UserError
from hyperpod_ft.runs.journal import Journal
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages.model_card import model_card
from hyperpod_ft.stages.stage import Result, main

_REMEDY = "restore it, or remove it and run stage train again, which resumes from an earlier checkpoint"


def work(run: Run) -> Result:
    checkpoint = open_checkpoint(_best(run.journal) if run.config.training.keep_best else _last(run.journal))
    print(f"consolidate: {checkpoint.directory}", flush=True)
    dataset = run.config.dataset.questions
    template = chat_template.of(dataset, run.paths.base_model)
    questions = chat_template.describe(template, dataset)
    print(f"consolidate: chat template: {questions}", flush=True)
    text = template.text if template else None
    if run.config.training.method == "full":
        done = consolidate_model(
            checkpoint,
            run.paths.tuned_model,
            base=run.paths.base_model,
            dtype=run.config.merge.dtype,
            max_shard_bytes=int(run.config.merge.max_shard_size_gb * 1e9),
            card=model_card(run, questions),
            chat_template=text,
            stops=run.journal.ends_of_turns(),
        )
        output = run.paths.tuned_model
    else:
        done = consolidate_adapters(checkpoint, run.paths.adapter, base=run.paths.base_model, chat_template=text)
        output = run.paths.adapter
    print(f"consolidate: {done.tensors} tensors, {done.nbytes / 1e6:.1f} MB -> {output}", flush=True)
    facts = {
        "checkpoint": checkpoint.directory.name,
        "chat_template": questions,
        "tensors": done.tensors,
        "nbytes": done.nbytes,
    }
    return Result((output,), facts, xxh3=checksums.by_path(output))


def _best(journal: Journal) -> Path:
    """The checkpoint with the lowest validation loss. Raises UserError when it is unusable or not the training's."""
    trained = journal.record("train")
    best_step = trained.facts["best_step"] if trained else None
    checkpoint_directory.check_best(journal.paths.best_checkpoint, journal.plan["train"].fingerprint, best_step)
    return journal.paths.best_checkpoint


def _last(journal: Journal) -> Path:
    """The last checkpoint of the training. Raises UserError when it is unusable: an older one is a different model."""
    found = journal.paths.checkpoints_by_step()
    if not found:
        raise UserError(f"{journal.paths.checkpoints}: no checkpoint", checkpoint_directory.TRAIN_AGAIN)
    step = max(found)
    if reason := checkpoint_directory.why_unusable(found[step], journal.plan["train"].fingerprint):
        raise UserError(f"{found[step]}: not a complete checkpoint of this run: {reason}", _REMEDY)
    trained = journal.record("train")
    if trained is not None and step != trained.facts["steps"]:
        raise UserError(
            f"{found[step]}: not the last checkpoint: training ended at step {trained.facts['steps']}",
            checkpoint_directory.TRAIN_AGAIN,
        )
    return found[step]


if __name__ == "__main__":
    tokenizer.without_torch()
    main("consolidate", work)
