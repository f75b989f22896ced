"""What a report says about one run: plain values, read from the run's files by `gather`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hyperpod_ft.data.inspection.shown import ShownExample
from hyperpod_ft.launch.status import State
from hyperpod_ft.report.numbers import last_known
from hyperpod_ft.runs.jobs import Submission
from hyperpod_ft.runs.results.evaluation import EvaluationResult
from hyperpod_ft.runs.results.expert_load import Loads
from hyperpod_ft.runs.results.goodput import Held
from hyperpod_ft.runs.results.places import StepPlace
from hyperpod_ft.runs.results.sampled_answers import SampledAnswer
from hyperpod_ft.runs.results.samples import Samples
from hyperpod_ft.runs.results.slowest_rank import SlowestRank, slow
from hyperpod_ft.runs.results.training_summary import TrainingSummary

Activity = Literal["waiting", "starting", "working", "training", "lost", "restarting", "ending"]
ACTIVITIES: dict[Activity, str] = {
    "waiting": "waits for another stage or for a node",
    "starting": "starts: no step yet",
    "working": "works",
    "training": "trains",
    "lost": "steps lost to a restart, trained again",
    "restarting": "between two attempts",
    "ending": "saves and ends",
}


@dataclass(frozen=True)
class TimelineSpan:
    """What one job did for a while. Seconds count from the submission that the timeline begins with."""

    stage: str
    activity: Activity
    start: float
    end: float
    why: str  # what it waited for, started or worked at


@dataclass(frozen=True)
class ResumePoint:
    """Where training resumed after an attempt that did not finish."""

    step: int  # of the checkpoint that it resumed from; 0: the beginning
    seconds: float | None  # in the training loop at that step; None: not recorded
    lost_steps: int  # logged after that checkpoint, and trained again
    reason: str  # for example `rank 3: SIGKILL at step 42`


@dataclass(frozen=True)
class StageSummary:
    """One stage of the run."""

    name: str
    state: State
    seconds: float | None  # of work, once done
    job_id: str
    host: str
    detail: str
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Accelerators:
    """What training held, over all attempts."""

    nodes: int  # the most of an attempt
    devices: int  # accelerators on all nodes, the same; 0 where there are none


@dataclass(frozen=True)
class RunReport:
    """Everything on the page of a run. None or empty: not known, or not yet."""

    name: str  # name/id
    directory: str
    state: State
    written: str  # when this was read: ISO 8601, UTC
    submitted: str
    subject: Mapping[str, str]  # what was trained, on what, how: labels and values
    settings: Mapping[str, Any]  # the run file: `section.key` to value
    run_file: str  # the same, as YAML
    # of metrics.jsonl by their keys, all of one length, oldest first; `step` and `seconds` among them
    metrics: Mapping[str, Sequence[float | None]]
    steps_total: int | None
    base_validation_loss: float | None
    resume_points: Sequence[ResumePoint]
    places: Sequence[StepPlace]  # where its steps ran
    slowest_ranks: Sequence[SlowestRank]  # over time
    timeline: Sequence[TimelineSpan]
    stages: Sequence[StageSummary]
    accelerators: Accelerators | None
    held: Held | None  # what they were held for
    expert_load: tuple[Loads, Loads]  # of a mixture, in the first and the last step
    dataset: Mapping[str, Any]  # facts of stage dataset
    shown: Sequence[ShownExample]  # examples of its rows, token by token
    samples: Samples | None
    sampled: Sequence[SampledAnswer]  # while it was trained, oldest first
    evaluations: Sequence[EvaluationResult]
    training_summary: TrainingSummary | None  # once trained
    submissions: Sequence[Submission]
    errors: Sequence[str]  # of the stage that failed
    commands: Sequence[tuple[str, str]]  # what one may do next, and the command

    @property
    def validation_losses(self) -> tuple[float | None, float | None]:
        """Of the base model and of the tuned one; (None, None) before the training is done."""
        if self.training_summary is None or self.training_summary.validation_loss is None:
            return None, None
        return self.base_validation_loss, self.training_summary.validation_loss

    @property
    def tokens_per_second(self) -> float | None:
        """Of the whole training, padding included; of the newest rows while it runs."""
        if self.training_summary:
            return self.training_summary.tokens_per_second
        return last_known(self.metrics.get("tokens_per_second", ()))

    @property
    def mfu(self) -> float | None:
        """0 to 1, likewise."""
        return self.training_summary.mfu if self.training_summary else last_known(self.metrics.get("mfu", ()))

    @property
    def slow_ranks(self) -> Sequence[SlowestRank]:
        return slow(self.slowest_ranks)

    @property
    def seconds(self) -> float:
        """From the submission that the timeline begins with to its end; 0 without a timeline."""
        return max((span.end for span in self.timeline), default=0.0)
