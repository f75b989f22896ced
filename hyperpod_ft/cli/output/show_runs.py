"""Output of the commands about runs: lines and tables."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from hyperpod_ft.cli.output.tables import clip, clip_start, console, shown, table
from hyperpod_ft.config import engine_choice
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.errors import printable
from hyperpod_ft.launch.follow import last_lines
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.launch.preflight import Preview
from hyperpod_ft.launch.status import MAY_CHANGE, RunStatus
from hyperpod_ft.planning.automatic.choice import Proposal
from hyperpod_ft.planning.memory import GIB
from hyperpod_ft.planning.model_fit import TrainingFit
from hyperpod_ft.progress import format_bytes
from hyperpod_ft.runs.assets import is_adapter_known, with_adapter
from hyperpod_ft.runs.jobs import Job
from hyperpod_ft.runs.results import places, training_summary
from hyperpod_ft.runs.results.evaluation import EvaluationResult, evaluations
from hyperpod_ft.runs.results.samples import Samples
from hyperpod_ft.runs.results.training_summary import TrainingSummary
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.selection import choose

_ANSWERS_SHOWN = 5
STATE_STYLES = {
    "done": "green",
    "running": "cyan",
    "failed": "bold red",
    "cancelled": "yellow",
    "pending": "dim",
    "unknown": "yellow",
}


def _print_memory(fit: TrainingFit, available_bytes: float) -> None:
    if fit.memory:
        least = f"; {fit.unknown}" if fit.unknown else ""
        print(f"memory    {fit.memory}; available: {available_bytes / GIB:.1f} (estimated){least}")
    elif fit.unknown:
        print(f"memory    unknown: {fit.unknown}")
    if fit.checkpoint_memory:
        taken = format_bytes(fit.checkpoint_memory)
        print(f"memory    memory checkpoints take {taken} of each node's /dev/shm (estimated)")


def plan(preview: Preview) -> None:
    run, degrees = preview.run, preview.run.plan.degrees
    print(f"run       {run.paths.full_name}  in {shown(run.paths.directory)}")
    training = run.config.training
    why = f" ({found})" if (found := engine_choice.why(run.config)) else ""
    print(f"engine    {run.config.engine}, {training.objective}, {training.method}, {training.precision}{why}")
    _print_changes(run.config)
    print(
        f"ranks     {degrees.nodes} x {run.config.cluster.instance_type}, {degrees.ranks_per_node} per node"
        f" = {degrees.world_size}: tensor {degrees.tensor_parallel} x pipeline {degrees.pipeline_parallel}"
        f" x context {degrees.context_parallel} x data {degrees.data_parallel}"
        + (f", experts over {degrees.expert_parallel}" if degrees.expert_parallel > 1 else "")
    )
    if run.proposal:
        print("degrees   chosen by estimates (docs/parallelism.md):")
        console().print(_proposal(run.proposal))
    if preview.fit is None:
        print(f"model     not looked at: {run.config.model.source} is not on this machine; stage download checks it")
    else:
        print(f"sharding  {preview.fit.sharding}")
        if preview.fit.pipeline:
            print(f"pipeline  {preview.fit.pipeline}")
        _print_memory(preview.fit, preview.available_bytes)
    if "certify" in run.plan:
        print(f"model     {preview.certificate or 'what it allows is known after stage certify'}")
    print(f"step      {preview.rows_per_step} rows, at most {preview.tokens_per_step:,} tokens")
    if preview.steps is None:
        print("steps     unknown until the dataset is prepared")
    else:
        print(f"steps     {preview.steps.total}, {preview.steps.per_epoch:.1f} per epoch")
    stages = table("stage", "", "why", "nodes", "partition", "fingerprint")
    for stage in preview.stages:
        skipped = "not needed by later stages" if stage.reason else "done"
        resources = stage.plan.resources
        stages.add_row(
            stage.plan.name,
            "run" if stage.runs else "skip",
            stage.reason if stage.runs else skipped,
            str(resources.nodes),
            resources.partition or "default",
            stage.plan.fingerprint,
        )
    console().print(stages)
    if preview.refused:
        print(f"submit refuses this: {preview.refused}")
    for launcher, of_launcher in groupby(preview.other_jobs, lambda job: job.launcher):
        jobs = table("job", "stages", "instances", "at most", "image")
        for job in of_launcher:
            limit = f"{job.seconds / 3600:,.4g} h"
            jobs.add_row(job.name, " ".join(job.stages), job.instances, limit, Text(job.image))
        print(f"with --launcher {launcher}:")
        console().print(jobs)


def _print_changes(config: RunConfig) -> None:
    """What makes the base model another one than that of `model.source`, whom it learns from, and who answers."""
    if tokens := config.model.added_tokens:
        print(f"tokens    {len(tokens)} new: {clip(', '.join(map(repr, tokens)), 80)}")
    if config.model.adapter:
        print(f"adapter   continues {shown(config.model.adapter.source)}, {_of_adapter(config)}")
    if config.teacher:
        print(f"teacher   {shown(config.teacher.source)}")
    if config.vllm_share:
        print(f"answers   every rank trains, and samples with vLLM in {config.vllm_share:g} of its GPU's memory")


def _of_adapter(config: RunConfig) -> str:
    if not is_adapter_known(config):
        return "whose settings are known after stage download"
    lora = with_adapter(config).lora
    trained = (
        *(lora.target_modules or ()),
        *lora.target_parameters,
        *(f"{name} whole" for name in lora.modules_to_save),
    )
    return f"r {lora.r}, alpha {lora.alpha:g}: {', '.join(trained)}"


def _proposal(proposal: Proposal) -> RenderableType:
    """Memory and speed are estimated for accelerators only: without them, their columns are left out."""
    estimated = proposal.chosen.needed is not None
    listed = table("", "degrees", "sharding", *(["GiB"] * estimated), "rows a step", *(["tokens/s"] * estimated), "")
    for allowed in (proposal.chosen, *proposal.slower):
        listed.add_row(
            "*" if allowed is proposal.chosen else "",
            str(allowed.degrees),
            str(allowed.sharding),
            *([f"{allowed.needed / GIB:.1f}"] if allowed.needed is not None else []),
            str(allowed.rows_per_step),
            *([f"{allowed.tokens_per_second:,.0f}"] if estimated else []),
        )
    for degrees, reason in proposal.refused:
        listed.add_row("", str(degrees), "", *[""] * (3 if estimated else 1), Text(reason))
    return listed


def moved(run: Run) -> None:
    degrees, training = run.plan.degrees, run.config.training
    print(
        f"Continues on {degrees.nodes} x {run.config.cluster.instance_type} ({degrees}): micro_batch_size"
        f" {training.micro_batch_size} x gradient_accumulation_steps {training.gradient_accumulation_steps}"
        f" x {degrees.data_parallel} data-parallel ranks, {run.config.rows_per_step(degrees.data_parallel)} rows a step"
    )


def submitted(run: Run, launchers: Launchers, jobs: Sequence[Job], only: str | None = None) -> None:
    if not jobs:
        left = ", ".join(stage.name for stage in choose(run))
        print(f"Nothing to submit: {f'stage {only}' if left else 'every stage'} of {run.paths.full_name} is done.")
        print(f"Not done: {left}" if left else f"Model: {shown(launchers.location(run, run.paths.tuned_model))}")
        return
    skipped = [stage.name for stage in run.plan.stages if run.journal.is_done(stage.name)]
    stages_of: dict[str, list[str]] = {}
    for job in jobs:  # a training job runs several stages
        stages_of.setdefault(job.job_id, []).append(job.stage)
    listed = ", ".join(f"{' + '.join(stages)} {job_id}" for job_id, stages in stages_of.items())
    print(f"Submitted {run.paths.full_name}: {listed}")
    if launchers.group_stages(jobs[0]):
        print(f"created training job {jobs[0].job_id}")  # the first one; the others wait for its records
    if skipped:
        print(f"Skipped, already done: {', '.join(skipped)}")
    if run.proposal:
        print(f"Degrees chosen: {run.plan.degrees} (`hyperpod-ft plan` shows why)")
    print(f"Run directory: {shown(run.paths.directory)}")
    print("Follow it: hyperpod-ft watch, hyperpod-ft logs -f; stop it: hyperpod-ft cancel")


def status(current: RunStatus) -> None:
    console().print(status_table(current))
    if current.training_summary:
        print(f"trained: {training_summary.line(current.training_summary)}")
    if changes := places.changes(current.places):
        print(f"trained on {current.places[0]}, {', '.join(changes)}")
    for slow in current.slow_ranks:
        print(slow)
    scores(current.evaluations)
    advice(current)


def cancelled_lines(jobs: Sequence[Job]) -> list[str]:
    if not jobs:
        return ["nothing to cancel: no job of this run is active"]
    return [f"cancelled {job.stage} (job {job.job_id})" for job in jobs]


def status_table(current: RunStatus) -> RenderableType:
    stages = table("stage", "state", "job", "")
    for stage in current.stages:
        detail = f"{stage.seconds:.1f} s  {stage.detail}" if stage.seconds is not None else stage.detail
        if stage.stage == "train" and stage.state == "running" and current.training:
            rows = current.training.rows_per_second
            rate = f"  {rows:,.2f} rows/s" if rows else ""
            detail = f"{training_progress(current)}{rate}  {detail}"
        elif stage.progress:
            detail = f"{stage.progress.text}  {detail}"
        detail = ", ".join(part for part in (stage.restarts, detail) if part)
        stages.add_row(stage.stage, Text(stage.state, STATE_STYLES.get(stage.state, "")), stage.job_id, Text(detail))
    return Group(Text(f"{current.name}: {current.state}  ({shown(current.directory)})"), stages)


def training_progress(current: RunStatus) -> str:
    training = current.training
    if training is None:
        return ""
    total = f"/{training.total_steps}" if training.total_steps else ""
    rate = f"  {training.tokens_per_second:,.0f} tokens/s" if training.tokens_per_second else ""
    mfu = f"  MFU {training.mfu:.1%}" if training.mfu is not None else ""
    preferred = f"  rewards/accuracies {training.reward_accuracy:.1%}" if training.reward_accuracy is not None else ""
    preferred += f"  reward {training.reward:.4f}" if training.reward is not None else ""
    return f"step {training.step}{total}  loss {training.loss:.4f}{preferred}{rate}{mfu}"


def advice(current: RunStatus) -> None:
    """A failed stage's error message, and in any case what to do next."""
    directory = shown(current.directory)
    if current.note:
        print(current.note)
    if failed := current.failed:
        print(f"\n{failed.stage} failed: {failed.detail}")
        for line in last_lines(failed):
            print(f"  | {printable(line)}")
        if failed.log:
            print(f"Whole log: {shown(failed.log)}")
        print(f"After correcting the run file or data: {current.submit_command}")
        again = "After correcting anything else:       " if failed.refused else "To try again without changes:         "
        if not current.refused:
            print(f"{again} hyperpod-ft resume {directory}")
    if current.refused and current.state not in MAY_CHANGE:
        print(f"Not resumed: {current.refused}")
    elif current.state in ("cancelled", "not run"):
        print(f"Resume it: hyperpod-ft resume {directory}")
    elif current.state == "done":
        print(f"Model: {shown(current.model)}")


def results(run: Run) -> None:
    """Base and tuned answers side by side, exact answers, validation losses and scores; a reward model has none."""
    if "generate" in run.plan:
        _answers(run)
    scores(evaluations(run))
    # written a moment after the record that ends the watching
    written = run.paths.report_path.exists()
    print(f"Report: {shown(run.paths.report_path) if written else f'hyperpod-ft report {shown(run.paths.directory)}'}")


def _answers(run: Run) -> None:
    samples = Samples.read(run.paths.samples_path)
    answers = table("prompt", "base model", "tuned model")
    rows = samples.unseen_first[:_ANSWERS_SHOWN]
    # alpaca's prompts, for example, all begin with the same long sentences
    same_start = len({clip(row.prompt) for row in rows}) < len({row.prompt for row in rows})
    for row in rows:
        prompt = clip_start(row.prompt) if same_start else clip(row.prompt)
        prompt = f"{clip(row.image_names)} {prompt}".lstrip()
        answers.add_row(*(Text(text) for text in (prompt, clip(row.base), clip(row.tuned))))
    console().print(answers)
    for line in samples.lines():
        print(line)
    if loss := samples.validation_loss:
        print(f"validation loss: base {loss.base.mean:.4f}, tuned {loss.tuned.mean:.4f}")
    for name, loss in samples.source_losses.items():
        print(f"validation loss, {name}: base {loss.base.mean:.4f}, tuned {loss.tuned.mean:.4f}")
    print(f"All answers: {shown(run.paths.samples_path)}")


def scores(results: Sequence[EvaluationResult]) -> None:
    """A line for each score of both models, without the members of groups."""
    if not results:
        return
    lines = [
        (evaluation.label(score.metric), str(score.base), str(score.tuned))
        for evaluation in results
        for score in evaluation.main_scores
    ]
    _columns(("task, metric", "base model", "tuned model"), lines)


def runs(root: Path, statuses: Sequence[RunStatus]) -> None:
    if not statuses:
        print(f"no runs below {root}")
        return
    print(f"runs below {root}, each in runs/NAME/ID:")
    listed = table("run", "state", "loss", "goodput", "submitted")
    for current in statuses:
        listed.add_row(
            Text(f"{current.name}/{Path(current.directory).name}"),
            Text(current.state, STATE_STYLES.get(current.state, "")),
            "" if current.loss is None else f"{current.loss:.4f}",
            "" if current.goodput is None else f"{current.goodput:.0%}",
            current.submitted,
        )
    console().print(listed)
    for note in dict.fromkeys(current.note for current in statuses if current.note):
        print(note)


def comparison(differing: Sequence[tuple[str, Sequence[str]]], compared: Sequence[TrainingSummary]) -> None:
    """The keys of the run files that differ, then the results: a column for each training."""
    head, *lines = training_summary.table(compared)
    if differing:
        _columns(("settings that differ", *head[1:]), [(key, *values) for key, values in differing])
    elif len(compared) > 1:
        print("the run files are the same")
    _columns(head, lines)


def _columns(head: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    listed = table(*head)
    for column in listed.columns[1:]:
        column.justify = "right"
    for cells in lines:
        listed.add_row(*(Text(cell) for cell in cells))
    console().print(listed)
