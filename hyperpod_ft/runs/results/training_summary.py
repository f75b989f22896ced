"""A training, by a run's records: how many steps it takes; its results, columns of `compare` and a line of `status`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, get_type_hints

from pydantic import TypeAdapter

from hyperpod_ft.config.sections.training import total_steps
from hyperpod_ft.errors import UserError
from hyperpod_ft.runs.records import checked
from hyperpod_ft.runs.results import holdings, places
from hyperpod_ft.runs.results.evaluation import EvaluationResult, evaluations
from hyperpod_ft.runs.results.metrics import OF_SOURCE, is_number
from hyperpod_ft.runs.results.places import StepPlace
from hyperpod_ft.runs.results.samples import AnswerCount, RougeScores, Split
from hyperpod_ft.runs.run import Run


@dataclass(frozen=True)
class _Line:
    """A line of the table: its name, and how a value is written."""

    name: str
    cell: Callable[[Any], str]


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:,.1f}"


def _answers(count: AnswerCount) -> str:
    return f"{count.tuned}/{count.rows} (base {count.base})"


def _rouge(both: RougeScores) -> str:
    return f"{both.tuned} (base {both.base})"


@dataclass(frozen=True)
class TrainingSummary:
    """A finished training. None: unknown for this machine or model, or not requested.

    A field is a line of the table, in this order, and the fact of that name unless `summary_of` says otherwise.
    """

    run: str  # name/id
    method: Annotated[str, _Line("method", str)]
    instances: Annotated[str, _Line("instances", str)]  # nodes x type
    trainable_parameters: Annotated[int | None, _Line("trainable parameters", "{:,.0f}".format)]
    steps: Annotated[int | None, _Line("steps", "{:,.0f}".format)]
    rows_per_second: Annotated[float | None, _Line("rows/s", "{:,.3f}".format)]  # packed rows
    # examples of the dataset
    documents_per_second: Annotated[float | None, _Line("documents/s", "{:,.3f}".format)]
    tokens_per_second: Annotated[float | None, _Line("tokens/s", "{:,.0f}".format)]  # padding included
    mfu: Annotated[float | None, _Line("MFU", "{:.1%}".format)]  # 0 to 1
    seconds_per_step: Annotated[float | None, _Line("s/step", "{:,.3f}".format)]
    seconds: Annotated[float | None, _Line("minutes", _minutes)]  # in the training loop, over all attempts
    warm_up_seconds: Annotated[float | None, _Line("warm-up, minutes", _minutes)]
    precompile_seconds: Annotated[float | None, _Line("precompile, minutes", _minutes)]  # in no other field
    attempts: Annotated[int | None, _Line("attempts", "{:,.0f}".format)]
    node_hours: Annotated[float | None, _Line("node-hours", "{:,.3f}".format)]
    goodput: Annotated[float | None, _Line("goodput", "{:.0%}".format)]  # 0 to 1
    accelerator_hours: Annotated[float | None, _Line("accelerator-hours", "{:,.2f}".format)]
    cost: Annotated[float | None, _Line("cost", "{:,.2f}".format)]
    first_loss: Annotated[float | None, _Line("base loss, first step", "{:.4f}".format)]
    final_loss: Annotated[float | None, _Line("final loss", "{:.4f}".format)]
    base_validation_loss: Annotated[float | None, _Line("base validation loss", "{:.4f}".format)]
    validation_loss: Annotated[float | None, _Line("final validation loss", "{:.4f}".format)]
    best_validation_loss: Annotated[float | None, _Line("best validation loss", "{:.4f}".format)]
    # of DPO and KTO, after the last step
    reward_margin: Annotated[float | None, _Line("rewards/margins", "{:.4f}".format)]
    reward_accuracy: Annotated[float | None, _Line("rewards/accuracies", "{:.1%}".format)]
    validation_reward_margin: Annotated[float | None, _Line("validation rewards/margins", "{:.4f}".format)]
    validation_reward_accuracy: Annotated[float | None, _Line("validation rewards/accuracies", "{:.1%}".format)]
    # of sampled answers and KTO, in the last step
    reward: Annotated[float | None, _Line("reward", "{:.4f}".format)]
    completion_length: Annotated[float | None, _Line("tokens of an answer", "{:,.1f}".format)]
    kl: Annotated[float | None, _Line("KL divergence from the base", "{:.4f}".format)]
    # of a mixture's experts, in the last step
    expert_load_max: Annotated[float | None, _Line("largest load of an expert", "{:.2f}".format)]
    dead_experts: Annotated[int | None, _Line("experts without a token", "{:,.0f}".format)]
    exact_train: Annotated[AnswerCount | None, _Line("exact answers, train", _answers)]
    exact_validation: Annotated[AnswerCount | None, _Line("exact answers, validation", _answers)]
    pattern_train: Annotated[AnswerCount | None, _Line("answers by pattern, train", _answers)]
    pattern_validation: Annotated[AnswerCount | None, _Line("answers by pattern, validation", _answers)]
    rouge_train: Annotated[RougeScores | None, _Line("ROUGE-1/2/L, train", _rouge)]
    rouge_validation: Annotated[RougeScores | None, _Line("ROUGE-1/2/L, validation", _rouge)]
    validation_losses: Mapping[str, float] = field(default_factory=dict)  # of several sources, a line for each
    evaluations: tuple[EvaluationResult, ...] = ()  # a line of the table for each score


# by the name of its field
_LINES: dict[str, _Line] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(TrainingSummary, include_extras=True).items()
    if hasattr(hint, "__metadata__")
}


def summary_of(run: Run) -> TrainingSummary | None:
    """What the training's record says, or None before it exists. Checkpoints may have been deleted since.

    Hours, goodput and cost include the end of its job, which came after the record, where the files here know it.
    """
    trained = run.journal.valid_record("train")
    if trained is None:
        return None
    precompiled = run.journal.valid_record("precompile")
    generated = run.journal.valid_record("generate")
    found = generated.facts if generated else {}
    counts = {
        f"{kind}_{split}": count
        for kind in ("exact", "pattern")
        for split, count in checked(_ANSWER_COUNTS, found.get(f"{kind}_match"), {}).items()
        if count.rows
    }
    rouge = {f"rouge_{split}": both for split, both in checked(_ROUGE_SCORES, found.get("rouge"), {}).items()}
    # ignore non-numeric values of a damaged record
    facts: dict[str, Any] = {name: value for name, value in trained.facts.items() if is_number(value)}
    held = holdings.read(run)
    known = {name: value for name, value in (holdings.hours(held) if held else {}).items() if value is not None}
    where = checked(places.PLACES, trained.facts.get("places"), ())
    values = {one.name: facts.get(one.name) for one in fields(TrainingSummary)} | {
        "run": run.paths.full_name,
        "method": run.config.training.method,
        "instances": _instances(run, where),
        "reward_margin": facts.get("rewards/margins", facts.get("margin")),
        "reward_accuracy": facts.get("rewards/accuracies", facts.get("accuracy")),
        "validation_reward_margin": facts.get("validation_rewards/margins"),
        "validation_reward_accuracy": facts.get("validation_rewards/accuracies"),
        "completion_length": facts.get("completions/mean_length"),
        "precompile_seconds": precompiled.seconds if precompiled else None,
        "cost": _cost(run, facts, where),
        "validation_losses": {
            name.removeprefix(OF_SOURCE): value for name, value in facts.items() if name.startswith(OF_SOURCE)
        },
        "evaluations": evaluations(run),
        **counts,
        **rouge,
        **known,
    }
    return TrainingSummary(**values)


def _instances(run: Run, where: Sequence[StepPlace]) -> str:
    """Where it would run now, if that is not known."""
    if not where:
        return f"{run.plan.degrees.nodes} x {run.config.cluster.instance_type}"
    return ", ".join([where[0].instances, *places.changes(where)])


def _cost(run: Run, facts: Mapping[str, Any], where: Sequence[StepPlace]) -> float | None:
    """At the price of the run file, which may be set after the training, unless another instance type had another."""
    hours, price, recorded = facts.get("node_hours"), run.config.cluster.price_per_node_hour, facts.get("cost")
    moved = {place.instance_type for place in where} - {run.config.cluster.instance_type}
    return recorded if moved or hours is None or price is None else round(hours * price, 4)


def require(run: Run) -> TrainingSummary:
    """Raises UserError when the run is not trained."""
    summary = summary_of(run)
    if summary is None:
        raise UserError(f"{run.paths.directory}: is not trained yet", f"see: hyperpod-ft status {run.paths.directory}")
    return summary


_ANSWER_COUNTS = TypeAdapter(dict[Split, AnswerCount])
_ROUGE_SCORES = TypeAdapter(dict[Split, RougeScores])


def table(compared: Sequence[TrainingSummary]) -> Iterator[tuple[str, ...]]:
    """Lines of a table with a column for each training, its head first. Lines without any value are left out."""
    yield ("", *(training.run for training in compared))
    for name, shown in _LINES.items():
        values = [getattr(training, name) for training in compared]
        if any(value is not None for value in values):
            yield (shown.name, *("" if value is None else shown.cell(value) for value in values))
    for source in dict.fromkeys(source for training in compared for source in training.validation_losses):
        losses = [training.validation_losses.get(source) for training in compared]
        yield (f"final validation loss, {source}", *("" if loss is None else f"{loss:.4f}" for loss in losses))
    scores = [_scores(training) for training in compared]
    for label in dict.fromkeys(label for of_training in scores for label in of_training):
        yield (label, *(of_training.get(label, "") for of_training in scores))


def _scores(training: TrainingSummary) -> dict[str, str]:
    """By what is scored; of several evaluations of one thing, the newest."""
    return {
        evaluation.label(score.metric): f"{score.tuned} (base {score.base})"
        for evaluation in training.evaluations
        for score in evaluation.main_scores
    }


def line(training: TrainingSummary) -> str:
    """The speed and the cost of a training run in one line."""
    parts = (
        ("rows_per_second", "{} rows/s"),
        ("tokens_per_second", "{} tokens/s"),
        ("mfu", "MFU {}"),
        ("seconds_per_step", "{} s/step"),
        ("seconds", "{} min"),
        ("goodput", "goodput {}"),
        ("accelerator_hours", "{} accelerator-hours"),
        ("cost", "cost {}"),
    )
    known = ((form, _LINES[name].cell, getattr(training, name)) for name, form in parts)
    return ", ".join(form.format(cell(value)) for form, cell, value in known if value is not None)


@dataclass(frozen=True)
class Steps:
    """Optimizer steps in one pass over the training rows, and in the whole run."""

    per_epoch: float
    total: int


def steps(run: Run) -> Steps | None:
    """How many optimizer steps the run takes; None until its dataset is prepared, or if its record is damaged."""
    record = run.journal.record("dataset")
    if record is None or run.journal.why_not_done("dataset"):
        return None
    training, rows = run.config.training, record.facts.get("train_rows")
    if not isinstance(rows, int) or not is_number(rows):
        return None
    per_step = run.config.rows_per_step(run.plan.degrees.data_parallel)
    return Steps(rows / per_step, total_steps(training, rows, per_step))
