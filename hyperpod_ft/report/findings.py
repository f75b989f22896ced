"""What a report's headings say: the finding of each section in one sentence."""

from collections.abc import Mapping, Sequence
from typing import Any

from hyperpod_ft.report.numbers import duration, number, percent
from hyperpod_ft.report.run_report import RunReport


def lead(report: RunReport) -> str:
    """What was trained on what, and how far it is."""
    method = {"lora": "LoRA", "full": "Full fine-tuning"}[report.settings["training.method"]]
    model, dataset_name = (_short(report.settings[key]) for key in ("model.source", "dataset.source"))
    size = f"{report.settings['cluster.nodes']} x {report.settings['cluster.instance_type']}"
    text = f"{method} of {model} on {dataset_name}, {size}"
    steps = _last(report.metrics.get("step", ()))
    if report.state != "done" and steps and report.steps_total:
        return f"{text}; step {steps:,.0f} of {report.steps_total:,}."
    return f"{text}; submitted {report.submitted}." if report.submitted else f"{text}."


def tiles(report: RunReport) -> list[tuple[str, str, str]]:
    """The figures that matter most: label, value, and how it compares; the value is empty where it is not known."""
    figures, held = report.figures, report.accelerators
    tuned = base = None
    if figures and figures.validation_loss is not None:
        tuned, base = figures.validation_loss, report.base_validation_loss
        if base is None and report.samples and report.samples.validation_loss:
            base = report.samples.validation_loss.base.mean
    exact = report.samples.exact_match if report.samples else {}
    tokens = figures.tokens_per_second if figures else _last(report.metrics.get("tokens_per_second", ()))
    mfu = figures.mfu if figures else _last(report.metrics.get("mfu", ()))
    total = max((span.end for span in report.timeline), default=0.0)
    return [
        (
            "Validation loss",
            number(tuned) if tuned is not None else "",
            f"base {number(base)}" if base is not None else "",
        ),
        *(
            (f"Exact answers, {split}", f"{count.tuned} of {count.rows}", f"base {count.base}")
            for split, count in exact.items()
            if count.rows
        ),
        ("Training speed", f"{tokens:,.0f} tokens/s" if tokens is not None else "", f"MFU {mfu:.1%}" if mfu else ""),
        ("Time, submission to end" if report.state == "done" else "Time so far", duration(total) if total else "", ""),
        (
            "Training held",
            f"{number(held.node_hours)} node-hours" if held else "",
            f"cost {held.cost:,.2f}" if held and held.cost is not None else "",
        ),
        ("Restarts", str(len(report.resume_points)) if report.resume_points else "", ""),
    ]


def loss(report: RunReport) -> str:
    """How the losses changed."""
    figures = report.figures
    base = report.base_validation_loss
    if figures and figures.validation_loss is not None:
        last = figures.validation_loss
        first = base if base is not None else None
        if first is None and report.samples and report.samples.validation_loss:
            first = report.samples.validation_loss.base.mean
        if first is not None:
            best = figures.best_validation_loss
            turned = best is not None and last - best > 0.05 * max(1e-9, first - best)
            lowest = f"; it was lowest before that, at {number(best)}" if turned and best is not None else ""
            return f"Validation loss {_went(first, last)} from {number(first)} to {number(last)}{lowest}"
        return f"Validation loss is {number(last)} at the end"
    losses = [value for value in report.metrics.get("loss", ()) if value is not None]
    if not losses:
        return "No step has been logged yet"
    return f"Training loss {_went(losses[0], losses[-1])} from {number(losses[0])} to {number(losses[-1])}"


def _went(first: float, last: float) -> str:
    if last == first:
        return "stayed"
    return "fell" if last < first else "rose"


def answers(report: RunReport) -> str:
    """How many answers are exact before and after."""
    assert report.samples is not None
    parts = []
    for split, exact in report.samples.exact_match.items():
        if exact.rows:
            seen = "rows it was trained on" if split == "train" else "validation rows it never saw"
            parts.append(f"{exact.tuned} of {exact.rows} {seen} (base {exact.base})")
    if parts:
        return f"The tuned model answers exactly: {', '.join(parts)}"
    changed, total = report.samples.answers_changed, report.samples.answers
    return f"{changed} of {total} answers differ from the base model's"


def speed(report: RunReport) -> str:
    """How fast it trained and what it took."""
    figures, metrics = report.figures, report.metrics
    tokens = figures.tokens_per_second if figures else _last(metrics.get("tokens_per_second", ()))
    mfu = figures.mfu if figures else _last(metrics.get("mfu", ()))
    memory = max((value for value in metrics.get("memory_mb", ()) if value is not None), default=None)
    parts = []
    if tokens is not None:
        parts.append(f"{tokens:,.0f} tokens/s")
    if mfu is not None:
        parts.append(f"{mfu:.1%} of the hardware's peak FLOPs")
    if memory is not None:
        parts.append(f"at most {number(memory / 1000)} GB of memory on rank 0")
    if not parts:
        return "Speed is not known yet"
    verb = "Training ran at " if report.state == "done" else "Training runs at "
    return verb + ", ".join(parts)


def timeline(report: RunReport) -> str:
    """How long the run took, and how much of what training held was used."""
    total = max((span.end for span in report.timeline), default=0.0)
    parts = [f"{'The run took' if report.state == 'done' else 'So far'} {duration(total)}"]
    held = report.accelerators
    if held and held.held_seconds:
        share = held.training_seconds / held.held_seconds
        parts.append(f"training held {_hardware(report)} for {duration(held.held_seconds)} and used {percent(share)}")
    if resumed := len(report.resume_points):
        lost = sum(point.lost_steps for point in report.resume_points)
        parts.append(f"{resumed} restart{'s' * (resumed > 1)}, {lost:,} steps trained again")
    return "; ".join(parts)


def idle(report: RunReport) -> list[tuple[str, float]]:
    """What training's nodes did besides training, and the seconds of each, longest first."""
    names = {
        "starting": "starting: node checks, ranks, model and data",
        "lost": "steps that a restart lost",
        "restarting": "between attempts",
        "ending": "last checkpoint and ending",
    }
    totals: dict[str, float] = {}
    for span in report.timeline:
        if span.stage == "train" and span.activity in names:
            totals[span.activity] = totals.get(span.activity, 0.0) + span.end - span.start
    return [(names[activity], seconds) for activity, seconds in sorted(totals.items(), key=lambda item: -item[1])]


def waiting(report: RunReport) -> float:
    """Seconds in which no job of the run had started, or all that had started were over: time in the queue."""
    busy = sorted((span.start, span.end) for span in report.timeline if span.activity != "waiting")
    end = max((span.end for span in report.timeline), default=0.0)
    covered, reached = 0.0, 0.0
    for start, stop in busy:
        covered += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return end - covered


def dataset(report: RunReport) -> str:
    """What the rows are made of."""
    facts = report.dataset
    share = facts["label_tokens"] / facts["tokens"]
    return (
        f"{facts['train_examples']:,} examples for training in {facts['train_rows']:,} rows;"
        f" the loss counts {percent(share)} of their tokens, {percent(facts['padding_share'])} of the rows is padding"
    )


def dataset_facts(report: RunReport) -> list[tuple[str, str]]:
    """Counts of rows and tokens: labels and values."""
    facts = report.dataset
    found = [
        ("Rows of the dataset", f"{facts['rows_read']:,} read, {facts['rows_used']:,} used, {facts['bad_rows']:,} bad"),
        ("Examples", f"{facts['train_examples']:,} training, {facts['validation_examples']:,} validation"),
        ("Packed rows", f"{facts['train_rows']:,} training, {facts['validation_rows']:,} validation"),
        ("Tokens", f"{facts['tokens']:,}, of which {facts['label_tokens']:,} count in the loss"),
        ("Padding", percent(facts["padding_share"])),
        ("Truncated, or dropped as too long", f"{facts['truncated']:,}, {facts['dropped']:,}"),
    ]
    if lengths := facts.get("lengths"):
        text = (
            f"median {number(lengths['median'])}, mean {number(lengths['mean'])}, longest {lengths['longest']:,} tokens"
        )
        found.append(("Length of a document", text))
    if facts["unknown_tokens"]:
        text = f"{facts['unknown_tokens']:,} in {facts['unknown_in']:,} examples: text without a token of the tokenizer"
        found.append(("Unknown tokens", text))
    return found


def packages(report: RunReport) -> list[str]:
    """The packages whose versions the stages recorded."""
    return list(dict.fromkeys(name for stage in report.stages for name in stage.versions))


def commit(submission: Mapping[str, Any]) -> str:
    """The commit of the directory that a run was submitted from."""
    git = submission.get("git")
    if not git:
        return ""
    changed = len(git.get("changed") or ())
    return f"{git.get('commit', '')[:12]}{f', {changed} files changed' if changed else ''}"


def cost(report: RunReport) -> str:
    held = report.accelerators
    assert held is not None
    hours = f"{number(held.node_hours)} node-hours"
    if held.cost is None:
        return f"Training took {hours}; the run file has no price"
    return f"Training cost {held.cost:,.2f}: {hours} at {held.price_per_node_hour:,.2f} each"


def methods(reports: Sequence[RunReport]) -> str:
    """Full fine-tuning against LoRA, if the runs are one of each; else which run has the lowest validation loss."""
    trained = [report.figures for report in reports if report.figures]
    by_method = {figures.method: figures for figures in trained}
    if len(reports) == len(trained) == 2 and set(by_method) == {"lora", "full"}:
        lora, full = by_method["lora"], by_method["full"]
        parts = []
        if lora.rows_per_second and full.rows_per_second:
            parts.append(f"trained {lora.rows_per_second / full.rows_per_second:.2f} times as many rows/s")
        if lora.seconds and full.seconds:
            parts.append(f"took {duration(lora.seconds)} instead of {duration(full.seconds)}")
        if lora.cost is not None and full.cost is not None:
            parts.append(f"cost {lora.cost:,.2f} instead of {full.cost:,.2f}")
        if lora.validation_loss is not None and full.validation_loss is not None:
            parts.append(f"ended at validation loss {number(lora.validation_loss)}, not {number(full.validation_loss)}")
        if parts:
            return f"LoRA against full fine-tuning: LoRA {', '.join(parts)}"
    losses = [(figures.validation_loss, figures.run) for figures in trained if figures.validation_loss is not None]
    if not losses:
        return f"{len(reports)} runs, none with a validation loss yet"
    value, name = min(losses)
    return f"{name} has the lowest final validation loss of {len(losses)} trained runs: {number(value)}"


def _hardware(report: RunReport) -> str:
    held = report.accelerators
    assert held is not None
    if held.devices:
        return f"{held.devices} accelerators"
    return f"{held.nodes} node{'s' * (held.nodes > 1)}"


def _short(source: str) -> str:
    """The Hub's id, or the last part of a path or URI."""
    return source.rstrip("/").rsplit("/", 1)[-1] if source.startswith(("/", "s3://")) else source


def _last(values: Sequence[float | None]) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)
