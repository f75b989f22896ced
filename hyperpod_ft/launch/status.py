"""The current state of runs: from their records, then the launchers, then the files that their scripts left."""

import contextlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hyperpod_ft.errors import EXIT_USER_ERROR, UserError
from hyperpod_ft.launch.decision import decide
from hyperpod_ft.launch.interface import JobState
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.launch.slurm.client import Slurm
from hyperpod_ft.launch.slurm.launcher import SlurmLauncher, cluster_is_gone, slurm_of, states_of_runs
from hyperpod_ft.runs import attempts
from hyperpod_ft.runs.jobs import Job
from hyperpod_ft.runs.journal import Journal
from hyperpod_ft.runs.records import unix_time
from hyperpod_ft.runs.references import all_runs
from hyperpod_ft.runs.results import holdings, metrics, places, slowest_rank
from hyperpod_ft.runs.results.evaluation import EvaluationResult, evaluations
from hyperpod_ft.runs.results.goodput import Held
from hyperpod_ft.runs.results.log_text import StageProgress, stage_progress
from hyperpod_ft.runs.results.places import StepPlace
from hyperpod_ft.runs.results.slowest_rank import SlowestRank
from hyperpod_ft.runs.results.training_summary import TrainingSummary, steps, summary_of
from hyperpod_ft.runs.run import Run

State = Literal["done", "running", "pending", "failed", "cancelled", "unknown", "not run"]
ACTIVE: tuple[State, ...] = ("running", "pending")
MAY_CHANGE: tuple[State, ...] = (*ACTIVE, "unknown")  # without a new submission


@dataclass(frozen=True)
class LatestMetrics:
    """Of a training run that is not done: the newest row of metrics.jsonl, and the number of all steps."""

    step: int
    total_steps: int | None
    loss: float
    tokens_per_second: float | None
    rows_per_second: float | None = None  # packed rows
    mfu: float | None = None  # 0 to 1
    reward_accuracy: float | None = None  # of DPO, 0 to 1
    reward: float | None = None  # of the answers that it samples


@dataclass(frozen=True)
class StageStatus:
    """The state of one stage of a run."""

    stage: str
    state: State
    detail: str = ""
    job_id: str = ""
    seconds: float | None = None  # of work, once done
    log: str = ""  # path
    restarts: str = ""  # of its newest submission, in words
    progress: StageProgress | None = None  # while it runs, where its log says how far it is
    refused: bool = False  # failed with a user's error: without a correction it will fail again


@dataclass(frozen=True)
class RunStatus:
    """The state of a run and of its stages."""

    name: str
    directory: str
    model: str  # where the tuned model is, or will be
    state: State
    stages: tuple[StageStatus, ...]
    submitted: str = ""  # last, ISO 8601, UTC
    submit_command: str = ""  # with the run file or recipe, its overrides and launcher
    refused: str = ""  # why neither `submit` nor `resume` trains it again unasked
    training: LatestMetrics | None = None  # until it is done
    places: tuple[StepPlace, ...] = ()  # where its steps ran; only where a single run was asked for
    slow_ranks: tuple[SlowestRank, ...] = ()  # likewise
    goodput: float | None = None  # 0 to 1
    held: Held | None = None  # what its nodes were held for; only where a single run was asked for
    training_summary: TrainingSummary | None = None  # once trained
    evaluations: tuple[EvaluationResult, ...] = ()
    note: str = ""  # why states are unknown, or why the next job was refused

    @property
    def failed(self) -> StageStatus | None:
        return next((stage for stage in self.stages if stage.state == "failed"), None)

    @property
    def loss(self) -> float | None:
        """The final loss once trained, else the newest one; not a number where the training has diverged."""
        if self.training_summary:
            return self.training_summary.final_loss
        return self.training.loss if self.training else None

    def fraction(self, stage: StageStatus) -> float | None:
        """How much of one of its stages is done, 0 to 1; None where nothing says so."""
        if stage.state == "done":
            return 1.0
        training = self.training if stage.stage == "train" else None
        if training and training.total_steps:
            return training.step / training.total_steps
        return stage.progress.fraction if stage.progress else None

    def as_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        return asdict(self)


def status(run: Run, launchers: Launchers) -> RunStatus:
    """The state of every stage and of the run; `unknown` where no launcher answers, with the reason as note."""
    ran: tuple[StepPlace, ...] = ()
    slow: tuple[SlowestRank, ...] = ()
    with contextlib.suppress(OSError):  # of the rows: the state is known without them
        ran = places.read(run.paths)
        slow = slowest_rank.slow(slowest_rank.read(run.paths.slowest_ranks))
    return replace(_status(run, launchers), places=ran, slow_ranks=slow, held=holdings.read(run))


def _status(run: Run, launchers: Launchers) -> RunStatus:
    jobs = run.journal.latest_jobs()
    if not run.journal.unfinished(jobs):
        return status_of(run, launchers, jobs, {})
    try:
        states = launchers.states(run)
    except UserError as error:
        return status_of(run, launchers, jobs, None, str(error))
    return status_of(run, launchers, run.journal.latest_jobs(), states)


def status_of(
    run: Run,
    launchers: Launchers,
    jobs: Mapping[str, Job],
    states: Mapping[Job, JobState] | None,
    note: str = "",
) -> RunStatus:
    """The status of a run, given the newest job of each stage and the states that those not done had; None: no answer.

    Reads the records now, after the states were asked for: the record of a job that has ended since counts.
    """
    decision, summary = decide(run), summary_of(run)
    held = None if summary else holdings.read(run)
    needed = {stage.name for stage in decision.stages}
    stages = _one_at_a_time(
        (
            _stage_status(run, stage.name, jobs.get(stage.name), states, stage.name in needed)
            for stage in run.plan.stages
        ),
        {job.job_id for job in jobs.values() if launchers.group_stages(job)},
    )
    return RunStatus(
        name=run.config.name,
        directory=str(run.paths.directory),
        model=launchers.location(run, run.paths.tuned_model),
        state=_overall(stages),
        stages=stages,
        submitted=max((job.submitted for job in jobs.values()), default=""),
        submit_command=run.journal.submit_command(run.journal.submitted_as or "RUN_FILE"),
        refused=str(decision.refused or ""),
        training=_latest_metrics(run, stages),
        goodput=summary.goodput if summary else held.goodput if held else None,
        training_summary=summary,
        evaluations=evaluations(run),
        note=note,
    )


def with_progress(run: Run, current: RunStatus) -> RunStatus:
    """The same status with the progress that the run's files say now. Asks no launcher."""
    stages = tuple(replace(stage, progress=_stage_progress(stage.state, stage.log)) for stage in current.stages)
    return replace(current, stages=stages, training=_latest_metrics(run, stages))


def _one_at_a_time(stages: Iterable[StageStatus], groups: Collection[str]) -> tuple[StageStatus, ...]:
    """A job in `groups` runs its stages one after the other, so its state is that of its first unfinished stage.

    Two stages with one job id of Slurm were submitted to two, or to one that was set up anew.
    """
    jobs: set[str] = set()
    found = []
    for stage in stages:
        if stage.state == "done" or stage.job_id not in groups:
            found.append(stage)
            continue
        if stage.job_id in jobs:
            waits = stage.state in ACTIVE
            stage = replace(stage, state="pending" if waits else "not run", detail="", progress=None)  # noqa: PLW2901
        jobs.add(stage.job_id)
        found.append(stage)
    return tuple(found)


def _stage_status(
    run: Run, stage: str, job: Job | None, states: Mapping[Job, JobState] | None, needed: bool
) -> StageStatus:
    reason = run.journal.why_not_done(stage)
    job_id = job.job_id if job else ""
    log_path = str(run.journal.log_here(stage, job_id) or "") if job else ""
    if not reason:
        record = run.journal.record(stage)
        done_elsewhere = "" if job else "done by an earlier run"
        seconds = record.seconds if record else None
        return StageStatus(stage, "done", done_elsewhere, job_id, seconds, log_path, _restarts(run, stage, job_id))
    state_of_job = states.get(job) if states and job else None
    if not needed and not (state_of_job and state_of_job.active):
        return StageStatus(stage, "done", f"{reason}, and nothing needs it", job_id, None, log_path)
    if job is None:
        return StageStatus(stage, "not run", "" if reason == "has not run" else reason)
    if states is None:
        return StageStatus(stage, "unknown", "", job_id, None, log_path)
    state, detail = _job_state(run.journal, job, state_of_job)
    if state == "not run":
        detail = reason
    progress = _stage_progress(state, log_path)
    refused = state == "failed" and run.journal.exit_status(stage, job_id) == EXIT_USER_ERROR
    return StageStatus(stage, state, detail, job_id, None, log_path, _restarts(run, stage, job_id), progress, refused)


def _stage_progress(state: State, log: str) -> StageProgress | None:
    return stage_progress(Path(log)) if state == "running" and log else None


def _restarts(run: Run, stage: str, job_id: str) -> str:
    if not run.plan[stage].starts_ranks:
        return ""  # no supervisor starts it again
    return attempts.describe(attempts.of_submission(run.journal, stage, job_id), run.config.cluster.max_restarts)


def _job_state(journal: Journal, job: Job, job_state: JobState | None) -> tuple[State, str]:
    if job_state is not None and job_state.active:
        if job_state.state == "PENDING":
            return "pending", job_state.reason
        return "running", " ".join(part for part in (job_state.elapsed, job_state.nodes) if part)
    if (job_state is not None and job_state.state == "CANCELLED") or journal.paths.cancel_marker(
        job.stage, job.job_id
    ).exists():
        return "cancelled", ""
    exit_status = journal.exit_status(job.stage, job.job_id)
    if exit_status not in (None, 0):
        return "failed", f"exit status {exit_status}"
    if job_state is not None and job_state.state != "COMPLETED":
        return "failed", ": ".join(part for part in (job_state.state.lower(), job_state.reason) if part)
    if job_state is None and exit_status is None:
        if not journal.paths.log(job.stage, job.job_id).exists():
            return "not run", ""  # it never started
        return "failed", "the job no longer exists and left no exit status"
    return "not run", ""  # it succeeded; its outputs have been changed or deleted since


def _overall(stages: tuple[StageStatus, ...]) -> State:
    states = {stage.state for stage in stages}
    order: tuple[State, ...] = ("failed", "running", "pending", "unknown", "cancelled", "not run")
    return next((state for state in order if state in states), "done")


def _latest_metrics(run: Run, stages: tuple[StageStatus, ...]) -> LatestMetrics | None:
    training = next((stage for stage in stages if stage.stage == "train"), None)
    if training is None or training.state == "done":
        return None
    job = run.journal.latest_jobs().get("train")
    if job is None or not run.paths.metrics_path.exists():
        return None
    # rows of an earlier job say nothing about this one
    if run.paths.metrics_path.stat().st_mtime < unix_time(job.submitted):
        return None
    row = metrics.last_row(run.paths.metrics_path)
    if row is None:
        return None
    known = steps(run)
    return LatestMetrics(
        step=row["step"],
        total_steps=known.total if known else None,
        loss=math.nan if row.get("loss") is None else row["loss"],
        tokens_per_second=row.get("tokens_per_second"),
        rows_per_second=row.get("rows_per_second"),
        mfu=row.get("mfu"),
        reward_accuracy=row.get("rewards/accuracies"),
        reward=row.get("reward"),
    )


def list_runs(root: Path, launchers: Launchers) -> list[RunStatus]:
    """The status of every run below a root, newest first; names on stderr the runs that cannot be read."""
    # runs that were submitted in the same second stay in the order of their files
    return sorted(statuses_of(all_runs(root), launchers), key=lambda current: current.submitted, reverse=True)


def statuses_of(runs: Sequence[Run], launchers: Launchers) -> list[RunStatus]:
    """The status of each of these runs, which are below one root. Each Slurm is asked once for all of them."""
    statuses: dict[Path, RunStatus] = {}
    on_slurm: dict[Slurm, list[tuple[Run, Mapping[str, Job]]]] = {}
    for run in runs:
        jobs = run.journal.latest_jobs()
        unfinished = run.journal.unfinished(jobs)
        if unfinished and all(job.launcher == SlurmLauncher.name for job in unfinished):
            on_slurm.setdefault(slurm_of(run), []).append((run, jobs))
        else:
            statuses[run.paths.directory] = _status(run, launchers)
    for slurm, seen in on_slurm.items():
        for current in _of_slurm(slurm, seen, launchers):
            statuses[Path(current.directory)] = current
    return [statuses[run.paths.directory] for run in runs]


def _of_slurm(slurm: Slurm, seen: Sequence[tuple[Run, Mapping[str, Job]]], launchers: Launchers) -> list[RunStatus]:
    """The statuses of runs with unfinished jobs on one Slurm. Records are read after Slurm has answered."""
    jobs_of = [(run, [job for job in run.journal.unfinished(jobs) if not cluster_is_gone(job)]) for run, jobs in seen]
    try:
        answers = states_of_runs(slurm, jobs_of)
    except UserError as error:
        return [status_of(run, launchers, jobs, None, str(error)) for run, jobs in seen]
    return [status_of(run, launchers, jobs, states) for (run, jobs), states in zip(seen, answers, strict=True)]
