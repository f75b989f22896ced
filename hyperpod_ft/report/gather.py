"""Read what a report says about a run from the run's files. Starts nothing, asks no launcher, writes nothing."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from hyperpod_ft.config import yaml_text
from hyperpod_ft.config.sections.rewards import Reward
from hyperpod_ft.data.inspection import shown
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.follow import last_lines
from hyperpod_ft.launch.status import ACTIVE, MAY_CHANGE, RunStatus, StageStatus, State
from hyperpod_ft.planning.plan import Plan
from hyperpod_ft.progress import count
from hyperpod_ft.report import job_times
from hyperpod_ft.report.numbers import finite
from hyperpod_ft.report.run_report import Accelerators, ResumePoint, RunReport, StageSummary, TimelineSpan
from hyperpod_ft.report.timeline import timeline
from hyperpod_ft.runs import attempts
from hyperpod_ft.runs.records import Record, utc_now
from hyperpod_ft.runs.results import expert_load, holdings, places, sampled_answers, slowest_rank, usage
from hyperpod_ft.runs.results.evaluation import evaluations
from hyperpod_ft.runs.results.metrics import intact_rows
from hyperpod_ft.runs.results.samples import Samples
from hyperpod_ft.runs.results.training_summary import steps, summary_of
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.run_paths import RunPaths
from hyperpod_ft.runs.selection import choose

_DATASET_FACTS = (
    *("rows_read", "rows_used", "bad_rows", "train_examples", "validation_examples", "train_rows", "validation_rows"),
    *("tokens", "label_tokens", "padding_share", "truncated", "dropped", "unknown_tokens"),
)
_CHAT_FACTS = ("turns", "unrolled", "left_out", "compared_examples")


def gather(run: Run, status: RunStatus | None = None) -> RunReport:
    """What is known of the run. Without `status`, a stage is done or has not run, as its record says.

    Raises UserError when a file of the run that is never half-written is damaged, OSError when one cannot be read.
    """
    records: dict[str, Record] = {
        stage.name: record for stage in run.plan.stages if (record := run.journal.valid_record(stage.name))
    }
    state = status.state if status else ("done" if not choose(run) else "not run")
    metrics = _columns(run.paths)
    training = records.get("train")
    facts = training.facts if training else {}
    now = time.time() if state in ACTIVE else None
    spans = timeline(job_times.job_times(run.journal, records, metrics), now)
    known_steps = steps(run)
    samples = _samples(run.paths, records)
    failed = status.failed if status else None
    return RunReport(
        name=run.paths.full_name,
        directory=str(run.paths.directory),
        state=state,
        written=utc_now(),
        submitted=min((job.submitted for job in run.journal.jobs()), default=""),
        subject=_subject(run, facts),
        settings=run.config.by_key(),
        run_file=yaml_text.dump(run.config),
        metrics=metrics,
        steps_total=known_steps.total if known_steps else None,
        base_validation_loss=_base_validation_loss(facts, samples),
        resume_points=_resume_points(run.paths, facts, metrics),
        places=places.read(run.paths),
        slowest_ranks=slowest_rank.read(run.paths.slowest_ranks),
        timeline=spans,
        stages=_stages(run.plan, records, status),
        accelerators=_accelerators(run, spans),
        held=holdings.read(run),
        expert_load=expert_load.read(facts),
        dataset=_dataset(records),
        shown=shown.read(run.paths.dataset_path) if "dataset" in records else (),
        samples=samples,
        sampled=sampled_answers.read(run.paths.sampled_answers),
        evaluations=evaluations(run),
        training_summary=summary_of(run),
        submissions=run.journal.submissions(),
        errors=last_lines(failed) if failed else (),
        commands=_commands(run, state, failed),
    )


def _base_validation_loss(facts: Mapping[str, Any], samples: Samples | None) -> float | None:
    """As training measured it before its first step, or stage generate after it."""
    before = finite(facts.get("base_validation_loss"))
    if before is None and samples and samples.validation_loss:
        return finite(samples.validation_loss.base.mean)
    return before


def _columns(paths: RunPaths) -> dict[str, list[float | None]]:
    """metrics.jsonl by key; None where a row lacks the key, or its value is not a finite number."""
    rows = [row for _, row in intact_rows(paths.metrics_path)]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [finite(row.get(name)) for row in rows] for name in names}


def _subject(run: Run, facts: Mapping[str, Any]) -> dict[str, str]:
    config, degrees = run.config, run.plan.degrees
    training, lora, adapter, teacher = config.training, config.lora, config.model.adapter, config.teacher
    lengths = f"{config.dataset.max_length:,} tokens a row"
    if config.dataset.max_target_length:
        lengths += f", {config.dataset.max_target_length:,} of the target"
    method = f"LoRA, r {lora.r}, alpha {lora.alpha:g}" if training.method == "lora" else "every parameter"
    trained, total = (finite(facts.get(name)) for name in ("trainable_parameters", "total_parameters"))
    share = f" ({trained:,.0f} of {total:,.0f} parameters)" if trained and total else ""
    rows = config.rows_per_step(degrees.data_parallel)
    ranks = count(degrees.world_size, "rank")
    sampled = f"{config.sampling.generations} answers to each prompt, beta {config.sampling.beta:g}"
    known = steps(run)
    length = f"{known.total:,} steps ({known.total / known.per_epoch:.3g} epochs)" if known else "steps not known yet"
    return {
        "Base model": _pinned(config.model.asset.source, config.model.asset.revision),
        **({"Adapter continued": _pinned(adapter.source, adapter.asset.revision)} if adapter else {}),
        **({"Teacher": _pinned(teacher.source, teacher.asset.revision)} if teacher else {}),
        "Dataset": ", ".join(
            dict.fromkeys(_pinned(part.dataset.source, part.dataset.asset.revision) for part in config.dataset.parts)
        ),
        "Method": method + share,
        "Objective": {
            "sft": "supervised fine-tuning",
            "dpo": f"direct preferences (DPO), beta {config.dpo.beta:g}",
            "kto": f"desirable and other completions (KTO), beta {config.kto.beta:g}",
            "reward": "a reward model, of chosen and rejected completions",
            **{name: f"rewards ({name.upper()}) of {sampled}" for name in ("grpo", "rloo")},
            "distillation": f"distillation, beta {teacher.beta:g}" if teacher else "",
        }[training.objective],
        **({"Rewards": ", ".join(_rewarded(reward) for reward in config.reward)} if config.reward else {}),
        "Length": f"{length} of {rows:,} rows, {lengths}",
        "Learning rate": f"{training.learning_rate:g}, {training.schedule}, warm-up {training.warmup_share:.0%}",
        "Precision": training.precision,
        "Instances": f"{degrees.nodes} x {config.cluster.instance_type}, {ranks}: {degrees}",
        "Engine": config.engine,
        "Seed": str(config.seed),
    }


def _rewarded(reward: Reward) -> str:
    return f"{reward.known_as} x {reward.weight:g}"


def _pinned(source: str, revision: str) -> str:
    """Of a local path, its last part: the run file has all of it."""
    name = source.rsplit("/", 1)[-1] if source.startswith("/") else source
    return f"{name} @ {revision}" if revision else name


def _resume_points(
    paths: RunPaths, facts: Mapping[str, Any], metrics: Mapping[str, Sequence[float | None]]
) -> list[ResumePoint]:
    seconds = dict(zip(metrics.get("step", ()), metrics.get("seconds", ()), strict=False))

    def point(step: int, lost: int, reason: str) -> ResumePoint:
        return ResumePoint(step, 0.0 if step == 0 else seconds.get(step), lost, reason)

    unexplained = job_times.resumed_from(facts)
    ended = [(attempt, attempt.next_began(unexplained)) for attempt in attempts.history(paths, "train")]
    after_attempts = [point(step, max(0, attempt.step - step), attempt.reason) for attempt, step in ended]
    for resume_point in after_attempts:
        if resume_point.step in unexplained:
            unexplained.remove(resume_point.step)
    return sorted(
        [*after_attempts, *(point(step, 0, "a new job resumed the training") for step in unexplained)],
        key=lambda resume_point: resume_point.step,
    )


def _stages(plan: Plan, records: Mapping[str, Record], status: RunStatus | None) -> list[StageSummary]:
    states = {stage.stage: stage for stage in status.stages} if status else {}
    summaries = []
    for stage in plan.stages:
        record = records.get(stage.name)
        current = states.get(stage.name) or StageStatus(stage.name, "done" if record else "not run")
        summaries.append(
            StageSummary(
                name=stage.name,
                state=current.state,
                seconds=record.seconds if record else None,
                job_id=record.job_id if record else current.job_id,
                host=record.host if record else "",
                detail=", ".join(part for part in (current.restarts, current.detail) if part),
                versions=record.versions if record else {},
            )
        )
    return summaries


def _accelerators(run: Run, spans: Sequence[TimelineSpan]) -> Accelerators | None:
    if not any(span.stage == "train" and span.activity != "waiting" for span in spans):
        return None
    most = usage.read(run.paths) or [usage.beginning(run)]
    return Accelerators(
        nodes=max(attempt.nodes for attempt in most),
        devices=max(attempt.accelerators for attempt in most),
    )


def _dataset(records: Mapping[str, Record]) -> Mapping[str, Any]:
    """The facts about the rows; none if the record lacks one, or one is damaged."""
    facts = records["dataset"].facts if "dataset" in records else {}
    is_whole = facts.get("tokens") and _has(facts, _DATASET_FACTS)
    return {**facts, "chats": _chats(facts.get("chats"))} if is_whole else {}


def _chats(facts: Any) -> Mapping[str, Any]:
    """Those about conversations; none for other formats, or if one is damaged."""
    if not isinstance(facts, dict) or not _has(facts, _CHAT_FACTS):
        return {}
    tokens = facts.get("compared_tokens")
    is_whole = isinstance(tokens, list) and all(
        isinstance(one, dict) and one.get("tokens") and _has(one, ("tokens", "trained")) for one in tokens
    )
    return facts if is_whole else {}


def _has(facts: Mapping[str, Any], names: Sequence[str]) -> bool:
    return all(finite(facts.get(name)) is not None for name in names)


def _samples(paths: RunPaths, records: Mapping[str, Record]) -> Samples | None:
    if "generate" not in records or not paths.samples_path.exists():
        return None
    try:
        return Samples.read(paths.samples_path)
    except UserError:
        return None  # the page about everything else is worth more than the error


def _commands(run: Run, state: State, failed: StageStatus | None) -> list[tuple[str, str]]:
    directory = run.paths.directory
    if failed:
        return [
            ("Read the whole log", f"hyperpod-ft logs {directory} {failed.stage}"),
            ("Go on after a correction" if failed.refused else "Try again", f"hyperpod-ft resume {directory}"),
        ]
    if state in MAY_CHANGE:
        return [
            ("See how far it is", f"hyperpod-ft status {directory}"),
            ("Follow its log", f"hyperpod-ft logs -f {directory}"),
            ("Stop it; resume continues it", f"hyperpod-ft cancel {directory}"),
        ]
    if state != "done":
        return [("Continue it", f"hyperpod-ft resume {directory}")]
    asked = [
        ("Ask the tuned and the base model", f"hyperpod-ft serve {directory}"),
        ("Create a SageMaker endpoint", f"hyperpod-ft deploy {directory}"),
    ]
    return [
        *(asked if "generate" in run.plan else ()),
        ("Check the model's files", f"hyperpod-ft verify {directory}"),
        ("Compare with another run", f"hyperpod-ft report {directory} OTHER_RUN -o comparison.html"),
    ]
