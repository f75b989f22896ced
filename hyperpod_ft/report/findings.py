"""What a report's headings say: the finding of each section in one sentence."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from hyperpod_ft.report.numbers import duration, moment, number, percent
from hyperpod_ft.report.run_report import Accelerators, RunReport


def lead(report: RunReport) -> str:
    """What was trained on what, and how far it is."""
    method = {"lora": "LoRA", "full": "Full fine-tuning"}[report.settings["training.method"]]
    model, dataset_name = (_short(report.settings[key]) for key in ("model.source", "dataset.source"))
    nodes, instance = report.settings["cluster.nodes"], report.settings["cluster.instance_type"]
    size = f"{_count(nodes, 'local node')} without accelerators" if instance == "local" else f"{nodes} x {instance}"
    text = f"{method} of {model} with {dataset_name}, on {size}"
    steps = _last(report.metrics.get("step", ()))
    if report.state != "done" and steps and report.steps_total:
        return f"{text}; step {steps:,.0f} of {report.steps_total:,}."
    return f"{text}; submitted {moment(report.submitted)}." if report.submitted else f"{text}."


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
        (
            "Training speed",
            f"{tokens:,.0f}" if tokens is not None else "",
            f"tokens/s, MFU {mfu:.1%}" if mfu else "tokens/s",
        ),
        (
            "From submission to end" if report.state == "done" else "Since submission",
            duration(total) if total else "",
            _count(len(report.resume_points), "restart") if report.resume_points else "",
        ),
        _held(held),
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
            return f"Validation loss {_went(first, last)} from {number(first)} to {number(last)}{_lowest(report, last)}"
        return f"Validation loss is {number(last)} at the end"
    losses = [value for value in report.metrics.get("loss", ()) if value is not None]
    if not losses:
        return "No step has been logged yet"
    validation = _last(report.metrics.get("validation_loss", ()))
    also = f"; validation loss is {number(validation)}" if validation is not None else ""
    return f"Training loss {_went(losses[0], losses[-1])} from {number(losses[0])} to {number(losses[-1])}{also}"


def _held(held: Accelerators | None) -> tuple[str, str, str]:
    if held is None:
        return ("Training held", "", "")
    hours = f"{number(held.node_hours)} node-hours"
    return ("Training held", hours, "") if held.cost is None else ("Training cost", f"{held.cost:,.2f}", hours)


def _lowest(report: RunReport, last: float) -> str:
    """Where the validation loss was lower than at the end."""
    rows = zip(report.metrics.get("validation_loss", ()), report.metrics.get("step", ()), strict=False)
    best, step = min(((value, step) for value, step in rows if value is not None), default=(last, None))
    return f"; its lowest was {number(best)}, at step {step:,.0f}" if step is not None and best < 0.99 * last else ""


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
            seen = "training rows" if split == "train" else "rows it never saw"
            parts.append(f"{exact.tuned} of {exact.rows} {seen} (base: {exact.base})")
    if parts:
        return f"The tuned model answers exactly {', and '.join(parts)}"
    changed, total = report.samples.answers_changed, report.samples.answers
    return f"{changed} of {total} answers differ from the base model's"


def evaluations(report: RunReport) -> str:
    """On how many metrics the tuned model scores better, of those that say what is better."""
    scores = [one for evaluation in report.evaluations for one in evaluation.main_scores]
    compared = [
        (one.tuned.value - one.base.value) * (1 if one.metric.higher_is_better else -1)
        for one in scores
        if one.tuned.value is not None and one.base.value is not None and one.metric.higher_is_better is not None
    ]
    if not compared:
        return "Scores of evaluations"
    better, worse = sum(change > 0 for change in compared), sum(change < 0 for change in compared)
    metrics = _count(len(compared), "metric")
    return f"The tuned model scores better than its base on {better} of {metrics}, worse on {worse}"


def speed(report: RunReport) -> str:
    """How fast it trained and what it took."""
    figures, metrics = report.figures, report.metrics
    tokens = figures.tokens_per_second if figures else _last(metrics.get("tokens_per_second", ()))
    mfu = figures.mfu if figures else _last(metrics.get("mfu", ()))
    memory = max((value for value in metrics.get("memory_mb", ()) if value is not None), default=None)
    if tokens is None:
        return "The speed is not known yet"
    share = f", {mfu:.1%} of the hardware's peak FLOPs," if mfu is not None else ""
    used = f" and took at most {number(memory / 1000)} GB of memory on rank 0" if memory is not None else ""
    return f"Training ran at {tokens:,.0f} tokens/s{share}{used}"


def timeline(report: RunReport) -> str:
    """How long the run took, and how much of what training held was used."""
    total = max((span.end for span in report.timeline), default=0.0)
    parts = [f"{'The run took' if report.state == 'done' else 'So far'} {duration(total)}"]
    held = report.accelerators
    if held and held.held_seconds:
        share = held.training_seconds / held.held_seconds
        time = f"{duration(held.held_seconds)}, {percent(share)} of it in steps that count"
        parts.append(f"training held {_hardware(report)} for {time}")
    if report.resume_points:
        lost = sum(point.lost_steps for point in report.resume_points)
        parts.append(f"{_count(len(report.resume_points), 'restart')}, {_count(lost, 'step')} trained again")
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


def title(reports: Sequence[RunReport]) -> str:
    """Of a page about several runs."""
    methods_compared = {report.settings["training.method"] for report in reports}
    if methods_compared == {"lora", "full"}:
        return "LoRA and full fine-tuning compared"
    return " and ".join(report.name for report in reports) if len(reports) == 2 else f"{len(reports)} runs compared"


def methods(reports: Sequence[RunReport]) -> str:
    """Full fine-tuning against LoRA, if the runs are one of each; else which run has the lowest validation loss."""
    trained = [report.figures for report in reports if report.figures]
    by_method = {figures.method: figures for figures in trained}
    if len(reports) == len(trained) == 2 and set(by_method) == {"lora", "full"}:
        lora, full = by_method["lora"], by_method["full"]
        parts = []
        if lora.rows_per_second and full.rows_per_second:
            ratio = lora.rows_per_second / full.rows_per_second
            parts.append(f"trained {ratio:.2f} times as many rows a second as full fine-tuning")
        if lora.seconds and full.seconds:
            parts.append(f"took {duration(lora.seconds)} instead of {duration(full.seconds)}")
        if lora.cost is not None and full.cost is not None:
            parts.append(f"cost {lora.cost:,.2f} instead of {full.cost:,.2f}")
        if lora.validation_loss is not None and full.validation_loss is not None:
            parts.append(f"ended at validation loss {number(lora.validation_loss)}, not {number(full.validation_loss)}")
        if parts:
            return f"LoRA {', '.join(parts[:-1])}{', and ' if parts[1:] else ''}{parts[-1]}."
    losses = [(figures.validation_loss, figures.run) for figures in trained if figures.validation_loss is not None]
    if not losses:
        return f"{len(reports)} runs, none with a validation loss yet."
    value, name = min(losses)
    return f"{name} has the lowest final validation loss of {len(losses)} trained runs: {number(value)}."


def of_chart(chart: Mapping[str, Any]) -> str:
    """What a chart of several runs shows: which of them ends with the lowest loss, or was fastest."""
    if chart["name"] == "tokens_per_second":
        value, name = max((statistics.median(series["y"]), series["label"]) for series in chart["series"])
        return f"{name} is fastest, at a median of {value:,.0f} tokens/s"
    label = {"loss": "training loss", "validation_loss": "validation loss"}[chart["name"]]
    value, name = min((series["y"][-1], series["label"]) for series in chart["series"])
    return f"{name} ends with the lowest {label}, {number(value)}"


def _count(number_of: int, what: str) -> str:
    return f"{number_of:,} {what}{'s' * (number_of != 1)}"


def _hardware(report: RunReport) -> str:
    held = report.accelerators
    assert held is not None
    if held.devices:
        return f"{held.devices} accelerators"
    return _count(held.nodes, "node")


def _short(source: str) -> str:
    """The Hub's id, or the last part of a path or URI."""
    return source.rstrip("/").rsplit("/", 1)[-1] if source.startswith(("/", "s3://")) else source


def _last(values: Sequence[float | None]) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)
