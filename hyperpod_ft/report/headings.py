"""What the headings of the page about one run say: the finding of each section in one sentence."""

from hyperpod_ft.config.sources import Asset
from hyperpod_ft.progress import count
from hyperpod_ft.report.numbers import duration, last_known, moment, number, percent
from hyperpod_ft.report.run_report import RunReport
from hyperpod_ft.runs.results import expert_load


def lead(report: RunReport) -> str:
    """What was trained on what, and how far it is."""
    method = {"lora": "LoRA", "full": "Full fine-tuning"}[report.settings["training.method"]]
    model, dataset_name = Asset(report.settings["model.source"], "").short_name, _dataset_name(report)
    nodes, instance = report.settings["cluster.nodes"], report.settings["cluster.instance_type"]
    size = f"{count(nodes, 'local node')} without accelerators" if instance == "local" else f"{nodes} x {instance}"
    text = f"{method} of {model} with {dataset_name}, on {size}"
    steps = last_known(report.metrics.get("step", ()))
    if report.state != "done" and steps and report.steps_total:
        return f"{text}; step {steps:,.0f} of {report.steps_total:,}."
    return f"{text}; submitted {moment(report.submitted)}." if report.submitted else f"{text}."


def _dataset_name(report: RunReport) -> str:
    listed = report.settings["dataset.sources"] or [{"source": report.settings["dataset.source"]}]
    names = list(dict.fromkeys(Asset(one["source"], "").short_name for one in listed))
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def loss(report: RunReport) -> str:
    """How the losses changed."""
    base, tuned = report.validation_losses
    if tuned is not None:
        if base is None:
            return f"Validation loss is {number(tuned)} at the end"
        change = f"{_went(base, tuned)} from {number(base)} to {number(tuned)}"
        return f"Validation loss {change}{_lowest(report, tuned)}"
    losses = [value for value in report.metrics.get("loss", ()) if value is not None]
    if not losses:
        return "No step has been logged yet"
    validation = last_known(report.metrics.get("validation_loss", ()))
    also = f"; validation loss is {number(validation)}" if validation is not None else ""
    return f"Training loss {_went(losses[0], losses[-1])} from {number(losses[0])} to {number(losses[-1])}{also}"


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
    """How many answers are right before and after: by the pattern if there is one, else exactly."""
    assert report.samples is not None
    parts: dict[str, list[str]] = {}
    for kind, split, answered in report.samples.counts:
        seen = "training rows" if split == "train" else "rows it never saw"
        parts.setdefault(kind, []).append(f"{answered.tuned} of {answered.rows} {seen} (base: {answered.base})")
    for kind, right in (("answers by pattern", "right"), ("exact answers", "exact")):
        if kind in parts:
            return f"The tuned model gives the {right} answer for {', and '.join(parts[kind])}"
    changed, total = report.samples.answers_changed, report.samples.answers
    return f"{changed} of {total} answers differ from the base model's"


def sampled(report: RunReport) -> str:
    """How the mean reward of a step's answers changed."""
    rewards = [value for value in report.metrics.get("reward", ()) if value is not None]
    if not rewards:
        return "Answers of the training"
    return (
        f"The mean reward of a step {_went(rewards[0], rewards[-1])} from {number(rewards[0])} to {number(rewards[-1])}"
    )


def evaluations(report: RunReport) -> str:
    """On how many metrics the tuned model scores better, of those that say what is better."""
    scores = [score for evaluation in report.evaluations for score in evaluation.main_scores]
    compared = [
        (score.tuned.value - score.base.value) * (1 if score.metric.higher_is_better else -1)
        for score in scores
        if score.tuned.value is not None and score.base.value is not None and score.metric.higher_is_better is not None
    ]
    if not compared:
        return "Scores of evaluations"
    better, worse = sum(change > 0 for change in compared), sum(change < 0 for change in compared)
    metrics = count(len(compared), "metric")
    return f"The tuned model scores better than its base on {better} of {metrics}, worse on {worse}"


def experts(report: RunReport) -> str:
    """How evenly the routers of a mixture load its experts."""
    found = expert_load.described(*report.expert_load)
    return found[0].upper() + found[1:]


def speed(report: RunReport) -> str:
    """How fast it trained and what it took."""
    tokens, mfu = report.tokens_per_second, report.mfu
    memory = max((value for value in report.metrics.get("memory_mb", ()) if value is not None), default=None)
    if tokens is None:
        return "The speed is not known yet"
    share = f", {mfu:.1%} of the hardware's peak FLOPs," if mfu is not None else ""
    used = f" and took at most {number(memory / 1000)} GB of memory on rank 0" if memory is not None else ""
    return f"Training ran at {tokens:,.0f} tokens/s{share}{used}"


def timeline(report: RunReport) -> str:
    """How long the run took, and how much of what training held was used."""
    parts = [f"{'The run took' if report.state == 'done' else 'So far'} {duration(report.seconds)}"]
    if report.held and report.accelerators:
        time = f"{duration(report.held.seconds)}, goodput {percent(report.held.goodput)}"
        parts.append(f"training held {_hardware(report)} for {time}")
    if report.resume_points:
        lost = sum(point.lost_steps for point in report.resume_points)
        parts.append(f"{count(len(report.resume_points), 'restart')}, {count(lost, 'step')} trained again")
    return "; ".join(parts)


def dataset(report: RunReport) -> str:
    """What the rows are made of."""
    facts = report.dataset
    share = facts["label_tokens"] / facts["tokens"]
    return (
        f"{facts['train_examples']:,} examples for training in {facts['train_rows']:,} rows;"
        f" the loss counts {percent(share)} of their tokens, {percent(facts['padding_share'])} of the rows is padding"
    )


def cost(report: RunReport) -> str:
    held = report.held
    assert held is not None
    hours = f"{number(held.node_hours)} node-hours"
    if held.cost is None:
        return f"Training took {hours}; their price is not known"
    each = f" at {held.cost / held.node_hours:,.2f} each" if held.node_hours else ""
    return f"Training cost {held.cost:,.2f}: {hours}{each}"


def _hardware(report: RunReport) -> str:
    held = report.accelerators
    assert held is not None
    most = "up to " if len(report.places) > 1 else ""
    return most + (f"{held.devices} accelerators" if held.devices else count(held.nodes, "node"))
