"""The figures, counts and lists on the page about one run."""

from collections.abc import Mapping
from typing import Any

from hyperpod_ft.data.mixing import source_report
from hyperpod_ft.progress import count
from hyperpod_ft.report.numbers import duration, number, percent
from hyperpod_ft.report.run_report import RunReport
from hyperpod_ft.runs.jobs import Submission
from hyperpod_ft.runs.results.goodput import Held


def tiles(report: RunReport) -> list[tuple[str, str, str]]:
    """The figures that matter most: label, value, and how it compares; the value is empty where it is not known."""
    base, tuned = report.validation_losses
    tokens = report.tokens_per_second
    return [
        (
            "Validation loss",
            number(tuned) if tuned is not None else "",
            f"base {number(base)}" if base is not None else "",
        ),
        *(
            (f"{kind.capitalize()}, {split}", f"{count.tuned} of {count.rows}", f"base {count.base}")
            for kind, split, count in (report.samples.counts if report.samples else ())
        ),
        *(
            (f"ROUGE-L, {split}", number(both.tuned.rouge_l), f"base {number(both.base.rouge_l)}")
            for split, both in (report.samples.rouge.items() if report.samples else ())
        ),
        (
            "Training speed",
            f"{tokens:,.0f}" if tokens is not None else "",
            f"tokens/s, MFU {report.mfu:.1%}" if report.mfu else "tokens/s",
        ),
        (
            "From submission to end" if report.state == "done" else "Since submission",
            duration(report.seconds) if report.seconds else "",
            count(len(report.resume_points), "restart") if report.resume_points else "",
        ),
        _held(report.held),
    ]


def _held(held: Held | None) -> tuple[str, str, str]:
    if held is None:
        return ("Training held", "", "")
    hours = f"{number(held.node_hours)} node-hours"
    return ("Training held", hours, "") if held.cost is None else ("Training cost", f"{held.cost:,.2f}", hours)


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
    if images := facts.get("images"):
        found.append(("Images", f"{images:,}"))
    found += _chat_facts(facts["chats"])
    for source in source_report.read(facts):
        found.append((f"Source {source.name}", source.described(facts["train_examples"])))
    for name, losses in (report.samples.source_losses if report.samples else {}).items():
        found.append(
            (f"Validation loss, {name}", f"base {number(losses.base.mean)}, tuned {number(losses.tuned.mean)}")
        )
    if repeated := facts.get("validation_in_training"):
        found.append(("Validation examples that training has too", f"{repeated:,}"))
    if lengths := facts.get("lengths"):
        text = (
            f"median {number(lengths['median'])}, mean {number(lengths['mean'])}, longest {lengths['longest']:,} tokens"
        )
        found.append(("Length of an example", text))
    if facts["unknown_tokens"]:
        text = f"{facts['unknown_tokens']:,} in {facts['unknown_in']:,} examples: text without a token of the tokenizer"
        found.append(("Unknown tokens", text))
    return found


def _chat_facts(chats: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Of conversations; none for other formats."""
    if not chats:
        return []
    tokens = [
        f"{one['reason']} {one['tokens']:,}, {percent(one['trained'] / one['tokens'])}"
        for one in chats["compared_tokens"]
    ]
    return [
        ("Trained turns", f"{chats['turns']:,}"),
        ("Conversations that became several examples", f"{chats['unrolled']:,}"),
        ("Examples left out of used conversations", f"{chats['left_out']:,}"),
        (f"Tokens of {count(chats['compared_examples'], 'sampled example')}, trained share", "; ".join(tokens)),
    ]


def packages(report: RunReport) -> list[str]:
    """The packages whose versions the stages recorded."""
    return list(dict.fromkeys(name for stage in report.stages for name in stage.versions))


def commit(submission: Submission) -> str:
    """The commit of the directory that a run was submitted from; empty outside a checkout."""
    git = submission.git
    if git is None:
        return ""
    return git.commit[:12] + (f", {len(git.changed)} files changed" if git.changed else "")
