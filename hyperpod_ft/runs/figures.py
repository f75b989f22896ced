"""The results of a finished training, from its records: the columns of `compare`, and a line of `status`."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hyperpod_ft.errors import UserError
from hyperpod_ft.runs import usage
from hyperpod_ft.runs.records import Record
from hyperpod_ft.runs.run import Run


@dataclass(frozen=True)
class ExactAnswers:
    """Sampled rows of a split, and how many of them each model answered exactly."""

    rows: int
    base: int
    tuned: int


@dataclass(frozen=True)
class Figures:
    """One training. None: unknown for this machine or model, not requested, or not recorded by an earlier version."""

    run: str  # name/id
    method: str
    instances: str  # nodes x type
    trainable_parameters: int | None
    steps: int | None
    samples_per_second: float | None  # packed rows
    documents_per_second: float | None  # examples of the dataset
    tokens_per_second: float | None  # padding included
    mfu: float | None  # 0 to 1
    seconds_per_step: float | None
    seconds: float | None  # in the training loop, over all attempts
    warm_up_seconds: float | None
    precompile_seconds: float | None  # in no other figure
    attempts: int | None
    node_hours: float | None
    accelerator_hours: float | None
    cost: float | None
    first_loss: float | None
    final_loss: float | None
    base_validation_loss: float | None
    validation_loss: float | None
    best_validation_loss: float | None
    exact_train: ExactAnswers | None
    exact_validation: ExactAnswers | None


def figures(run: Run) -> Figures | None:
    """None when the run is not trained. The record counts: checkpoints may have been deleted since."""
    trained = _valid(run, "train")
    if trained is None:
        return None
    precompiled = _valid(run, "precompile")
    generated = _valid(run, "generate")
    exact = generated.facts.get("exact_match", {}) if generated else {}
    nodes = run.plan.degrees.nodes
    facts = trained.facts
    # the price may be set after the training
    hours = facts.get("node_hours")
    cost = usage.cost(run, hours) if hours is not None else None
    return Figures(
        run=f"{run.config.name}/{run.plan.run_id}",
        method=run.config.training.method,
        instances=f"{nodes} x {run.config.cluster.instance_type}",
        precompile_seconds=precompiled.seconds if precompiled else None,
        cost=facts.get("cost") if cost is None else cost,
        exact_train=_exact(exact.get("train")),
        exact_validation=_exact(exact.get("validation")),
        **{name: facts.get(name) for name in _FACTS},
    )


_FACTS = (
    "trainable_parameters",
    "steps",
    "samples_per_second",
    "documents_per_second",
    "tokens_per_second",
    "mfu",
    "seconds_per_step",
    "seconds",
    "warm_up_seconds",
    "attempts",
    "node_hours",
    "accelerator_hours",
    "first_loss",
    "final_loss",
    "base_validation_loss",
    "validation_loss",
    "best_validation_loss",
)


def require(run: Run) -> Figures:
    """Raises UserError when the run is not trained."""
    found = figures(run)
    if found is None:
        raise UserError(f"{run.directory}: is not trained yet", f"see: hyperpod-ft status {run.directory}")
    return found


def _valid(run: Run, stage: str) -> Record | None:
    record = run.record(stage) if stage in run.plan else None
    return record if record and record.fingerprint == run.plan[stage].fingerprint else None


def _exact(values: dict[str, Any] | None) -> ExactAnswers | None:
    return ExactAnswers(**values) if values and values["rows"] else None


# The lines of the table: a name, and how a cell is written; None leaves it empty.
_LINES: tuple[tuple[str, Callable[[Figures], str | None]], ...] = (
    ("method", lambda of: of.method),
    ("instances", lambda of: of.instances),
    ("trainable parameters", lambda of: _number(of.trainable_parameters, ",d")),
    ("steps", lambda of: _number(of.steps, ",d")),
    ("samples/s", lambda of: _number(of.samples_per_second, ",.3f")),
    ("documents/s", lambda of: _number(of.documents_per_second, ",.3f")),
    ("tokens/s", lambda of: _number(of.tokens_per_second, ",.0f")),
    ("MFU", lambda of: _number(of.mfu, ".1%")),
    ("s/step", lambda of: _number(of.seconds_per_step, ",.3f")),
    ("minutes", lambda of: _number(of.seconds and of.seconds / 60, ",.1f")),
    ("warm-up, minutes", lambda of: _number(of.warm_up_seconds and of.warm_up_seconds / 60, ",.1f")),
    ("precompile, minutes", lambda of: _number(of.precompile_seconds and of.precompile_seconds / 60, ",.1f")),
    ("attempts", lambda of: _number(of.attempts, ",d")),
    ("node-hours", lambda of: _number(of.node_hours, ",.3f")),
    ("accelerator-hours", lambda of: _number(of.accelerator_hours, ",.2f")),
    ("cost", lambda of: _number(of.cost, ",.2f")),
    ("base loss, first step", lambda of: _number(of.first_loss, ".4f")),
    ("final loss", lambda of: _number(of.final_loss, ".4f")),
    ("base validation loss", lambda of: _number(of.base_validation_loss, ".4f")),
    ("final validation loss", lambda of: _number(of.validation_loss, ".4f")),
    ("best validation loss", lambda of: _number(of.best_validation_loss, ".4f")),
    ("exact answers, train", lambda of: _answers(of.exact_train)),
    ("exact answers, validation", lambda of: _answers(of.exact_validation)),
)


def table(compared: Sequence[Figures]) -> Iterator[tuple[str, ...]]:
    """Lines of a table with a column for each training, its head first. Lines without any value are left out."""
    yield ("", *(of.run for of in compared))
    for name, cell in _LINES:
        cells = [cell(of) for of in compared]
        if any(text is not None for text in cells):
            yield (name, *(text or "" for text in cells))


def line(of: Figures) -> str:
    """The speed and the cost of a training in one line."""
    parts = (
        _number(of.samples_per_second, ",.3f", "{} samples/s"),
        _number(of.tokens_per_second, ",.0f", "{} tokens/s"),
        _number(of.mfu, ".1%", "MFU {}"),
        _number(of.seconds_per_step, ",.3f", "{} s/step"),
        _number(of.seconds and of.seconds / 60, ",.1f", "{} min"),
        _number(of.accelerator_hours, ",.2f", "{} accelerator-hours"),
        _number(of.cost, ",.2f", "cost {}"),
    )
    return ", ".join(part for part in parts if part)


def _number(value: float | None, form: str, words: str = "{}") -> str | None:
    return None if value is None else words.format(format(value, form))


def _answers(exact: ExactAnswers | None) -> str | None:
    return f"{exact.tuned}/{exact.rows} (base {exact.base})" if exact else None
