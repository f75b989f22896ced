"""The scores of evaluations with lm-evaluation-harness: of one model in a file, of both in the record of stage eval."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from hyperpod_ft import publish
from hyperpod_ft.runs.records import Record
from hyperpod_ft.runs.run import Run


@dataclass(frozen=True)
class Score:
    """One metric of one task, as the harness computes it. Both are None where it gives no finite number."""

    value: float | None
    stderr: float | None

    def __str__(self) -> str:
        if self.value is None:
            return "none"
        return f"{self.value:.4f}" + (f" ± {self.stderr:.4f}" if self.stderr is not None else "")


@dataclass(frozen=True)
class Metric:
    """What a score measures. Two models' scores of one metric can be compared."""

    task: str  # the harness's name of the task or group
    name: str  # acc, exact_match, perplexity, ...
    filter: str  # what the harness extracts from an answer before it compares: none, strict-match, ...
    version: str  # of the task
    num_fewshot: int | None  # None: the harness does not say
    samples: int | None  # questions; None: of a group
    part_of: str  # the group that was asked for and has this task; empty if none was
    higher_is_better: bool | None  # None: the task does not say


@dataclass(frozen=True)
class ModelScores:
    """One model's scores, in a file that grows by a task at a time.

    `tasks`: by the name that was asked for, which may be a group of tasks. `failed`: the error of each that failed.
    """

    conditions: dict[str, Any]  # what else the scores depend on: settings, versions, device
    tasks: dict[str, tuple[tuple[Metric, Score], ...]]
    failed: dict[str, str]

    @classmethod
    def read(cls, path: Path, conditions: Mapping[str, Any]) -> "ModelScores":
        """The scores in a file; none if it is missing, damaged, or of other conditions."""
        try:
            found = _SCORES.validate_json(path.read_bytes())
        except (OSError, ValueError):
            found = None
        return found if found and found.conditions == conditions else cls(dict(conditions), {}, {})

    def write(self, path: Path) -> None:
        publish.write_json(path, asdict(self))


_SCORES = TypeAdapter(ModelScores)


@dataclass(frozen=True)
class Compared:
    """One metric of both models."""

    metric: Metric
    base: Score
    tuned: Score


@dataclass(frozen=True)
class EvaluationResult:
    """One evaluation of the run's final model and of its base, under the same conditions."""

    tasks: tuple[str, ...]  # as asked for
    limit: int | None  # only the first questions of each task; None: all
    apply_chat_template: bool
    scores: tuple[Compared, ...]
    versions: dict[str, str]  # of Python, lm_eval, torch, transformers and others
    device: str  # cpu, or the accelerator's name
    finished: str = ""  # ISO 8601, UTC: when it began; empty before the record is written

    @property
    def main_scores(self) -> tuple[Compared, ...]:
        """Without those of a group's tasks that the group has a score of its own for."""
        known = {(score.metric.task, score.metric.name, score.metric.filter) for score in self.scores}
        return tuple(
            score
            for score in self.scores
            if (score.metric.part_of, score.metric.name, score.metric.filter) not in known
        )

    def label(self, metric: Metric) -> str:
        """For example `mmlu, acc (5-shot)`: what the score is, with what makes it incomparable to others."""
        details = [f"{metric.num_fewshot}-shot"] if metric.num_fewshot is not None else []
        details += [metric.filter] if metric.filter != "none" else []
        details += ["chat"] if self.apply_chat_template else []
        details += [f"first {self.limit}"] if self.limit else []
        return f"{metric.task}, {metric.name}" + (f" ({', '.join(details)})" if details else "")

    def as_facts(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "finished"}


_EVALUATION = TypeAdapter(EvaluationResult)


def compare(base: ModelScores, tuned: ModelScores, tasks: Sequence[str]) -> tuple[Compared, ...]:
    """The metrics of these tasks that both models have, in the harness's order."""
    return tuple(
        Compared(metric, dict(base.tasks[task])[metric], score)
        for task in tasks
        for metric, score in tuned.tasks[task]
        if metric in dict(base.tasks[task])
    )


def evaluations(run: Run) -> tuple[EvaluationResult, ...]:
    """The evaluations of the run's present model, the oldest first; also those that its run file no longer asks for."""
    return tuple(evaluation for _, evaluation in sorted(_recorded(run), key=lambda item: item[0]))


def _recorded(run: Run) -> Iterator[tuple[tuple[str, int], EvaluationResult]]:
    stage = run.plan.model_stage
    for path in run.journal.evaluation_records():
        record = Record.read(path)
        if record is None or record.inputs.get(stage) != run.plan[stage].fingerprint:
            continue
        try:
            order = record.started, path.stat().st_mtime_ns
            yield order, _EVALUATION.validate_python({**record.facts, "finished": record.started})
        except ValueError:
            continue  # of another version
