"""A run directory as a finished run leaves it, written by hand: no stage runs."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hyperpod_ft import publish
from hyperpod_ft.config import run_file
from hyperpod_ft.data.inspection import shown
from hyperpod_ft.data.inspection.shown import ShownDocument, ShownExample, ShownToken
from hyperpod_ft.heartbeat import Phase
from hyperpod_ft.runs import attempts
from hyperpod_ft.runs.attempts import Attempt, NodeFailure
from hyperpod_ft.runs.job_files import banner
from hyperpod_ft.runs.jobs import Job, Submission
from hyperpod_ft.runs.records import Record, unix_time
from hyperpod_ft.runs.results.samples import AnswerCount, Loss, Losses, RecordedAnswers, SampledRow, Samples
from hyperpod_ft.runs.results.usage import Usage
from hyperpod_ft.runs.run import Run
from tests.conftest import run_file_values

SPIKE = 987.5  # a loss, at one step in the middle
DATASET = {
    "rows_read": 100,
    "rows_used": 98,
    "train_examples": 90,
    "validation_examples": 8,
    "tokens": 4000,
    "label_tokens": 1000,
    "train_rows": 30,
    "validation_rows": 3,
    "padding_share": 0.03,
    "target_padding_share": None,
    "unknown_tokens": 0,
    "unknown_in": 0,
    "truncated": 1,
    "dropped": 2,
    "bad_rows": 2,
    "bad_reasons": {"empty": 2},
    "bad_listed": [],
    "chats": {
        "turns": 120,
        "unrolled": 7,
        "left_out": 1,
        "compared_examples": 98,
        "compared_tokens": [
            {"reason": "user", "tokens": 3000, "trained": 0},
            {"reason": "answer", "tokens": 1000, "trained": 1000},
        ],
    },
    "lengths": {"median": 30.0, "mean": 40.0, "longest": 119, "bin_width": 40, "counts": [50, 30, 18]},
}


def at(second: float) -> str:
    """A time of the run: seconds after it was submitted, less than an hour."""
    return f"2026-01-02T03:{int(second) // 60:02d}:{int(second) % 60:02d}Z"


def recorded_run(base: Path, steps: int = 100, prompt: str = "What is up?", **overrides: Any) -> Run:
    """A run of so many steps, each logged, whose rank 1 crashed at step 65; checkpoints every 20 steps.

    Its first attempt begins 10 s after the submission and ends after 40 s; the second lasts from 50 s to 90 s.
    """
    values = run_file_values(base / "root", **{"cluster__price_per_node_hour": 7.2} | overrides)
    run = Run.of(run_file.resolve(run_file.validate(values, "run.yaml"), base))
    run.freeze()
    (run.paths.logs).mkdir()
    for number, stage in enumerate(run.plan.stages, 1):
        _record(run, stage.name, str(number))
    checkpoint = steps * 6 // 10
    rows = [json.dumps(_row(step, steps, checkpoint)) + "\n" for step in range(1, steps + 1)]
    publish.write_text(run.paths.metrics_path, "".join(rows))
    crash = Attempt("5", at(40), 1, False, (NodeFailure("a", 1, 137, 0.0),), 0, 0, checkpoint, checkpoint + 5)
    attempts.add(run.paths, "train", crash)
    phases: tuple[dict[Phase, float], ...] = (
        {"start": 5.0, "step": 20.0},
        {"start": 10.0, "step": 20.0, "validation": 3.0, "save": 5.0, "end": 2.0},
    )
    for started, spent, reached in (
        (10, phases[0], ((0, 0.0), (checkpoint, 18.0))),
        (50, phases[1], ((checkpoint, 0.0),)),
    ):
        ran = (1, 0, "local", "dp 1 x tp 1", 1, 1, "a", None)
        attempt = Usage("5", at(started), sum(spent.values()), *ran, at(5), spent, reached)
        publish.write_json(run.paths.usage_path / f"{started}.json", asdict(attempt))
    _samples(prompt).write(run.paths.samples_path)
    run.paths.dataset_path.mkdir(parents=True)
    shown.write(run.paths.dataset_path, [_shown(prompt)])
    run.journal.add_submission(
        Submission(at(0), ["x"], "/home/me", "me", "head", "0.1.0", "/fsx/code/0.1.0-1", None), "1"
    )
    return run


def _row(step: int, steps: int, checkpoint: int) -> dict[str, Any]:
    first = step <= checkpoint
    share = step / checkpoint if first else (step - checkpoint) / (steps - checkpoint)
    return {
        "step": step,
        "epoch": step / steps * 3,
        "loss": SPIKE if step == steps // 2 else round(1 + 4 / step**0.5 + (step % 7) / 50, 6),
        "learning_rate": 1e-3 * (1 - step / steps),
        "grad_norm": 1 + (step % 5) / 10,
        "validation_loss": 5 - step / steps if step % max(1, steps // 10) == 0 else None,
        "seconds_per_step": 0.01,
        "tokens_per_second": 1000.0 + step % 13,
        "mfu": 0.25,
        "memory_mb": 1500.0,
        "seconds": step * 0.3,
        "time": unix_time(at(15 if first else 60)) + 20 * share,
    }


def _record(run: Run, stage: str, job_id: str) -> None:
    """Its job is submitted at once, starts 5 s after the one before it, and works from then on; train for 85 s."""
    number = int(job_id)
    started = 2 if number == 1 else 5 if number < 6 else 90 + 5 * (number - 5)
    facts: dict[str, Any] = {}
    seconds = 1.0
    if stage == "train":
        seconds = 85.0
        facts = {
            "steps": 100,
            "rows_per_second": 20.0,
            "tokens_per_second": 1000.0,
            "mfu": 0.25,
            "seconds": 30.0,
            "node_hours": 65 / 3600,
            "base_validation_loss": 5.5,
            "validation_loss": 4.0,
            "final_loss": 1.4,
            "resumed_from": [60],
            "trainable_parameters": 1000,
            "total_parameters": 5000,
        }
    if stage == "dataset":
        facts = DATASET
    if stage == "generate":
        facts = _samples("").summary()
    Record(
        stage,
        run.plan[stage].fingerprint,
        {},
        (),
        facts,
        at(started + 1),
        seconds,
        "node-a",
        job_id,
        {"python": "3.12"},
    ).write(run.paths.record_path(stage))
    run.journal.add_job(Job(stage, job_id, "slurm", at(0)))
    run.paths.log(stage, job_id).write_text(f"{banner(stage, job_id)} on node-a, {at(started)}\nworking\n")
    marker = run.paths.exit_marker(stage, job_id)
    publish.write_text(marker, "0\n")
    ended = unix_time(at(started + seconds + 2))
    os.utime(marker, (ended, ended))


def _shown(prompt: str) -> ShownExample:
    """An example that trains message 2."""
    tokens = [
        ShownToken("<|start|>", False, "template"),
        ShownToken(prompt, False, "user"),
        ShownToken("\n", False, "header"),
        ShownToken("the", True, "answer"),
        ShownToken(" sky", True, "answer"),
        ShownToken("<|end|>", True, "end of turn"),
    ]
    return ShownExample("rows.jsonl:7", (2,), "", (ShownDocument.of("", tokens),))


def _samples(prompt: str) -> Samples:
    loss = Losses(Loss(5.5, 100, 3, 3), Loss(4.0, 100, 3, 3))
    row = SampledRow("train", prompt, False, "the sky", "no", "the sky", False, True)
    answers = RecordedAnswers(prompt, False, "no", "yes")
    counts = {"train": AnswerCount(1, 0, 1), "validation": AnswerCount(0, 0, 0)}
    return Samples(counts, {}, loss, 2, 2, (answers,), (row,))  # type: ignore[arg-type]
