"""The recorded results as tables, written into docs/performance.md between its markers.

python -m benchmarks.table
"""

import json
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks import goals
from benchmarks.command import RESULTS, ROOT
from benchmarks.goals import COPY, EPOCHS, GOALS, KIT, LARGE, LOADED, REPEATED, S5CMD, SMALL, TEXT, Entry, Goal, Results

DOCUMENT = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- made by `python -m benchmarks.table` -->", "<!-- end -->"
_MISSING = "not measured"


def load(directory: Path = RESULTS) -> Results:
    """The results files by benchmark."""
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(directory.glob("*.json"))}


def document(text: str, results: Results) -> str:
    """A document with the text between its markers replaced."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    tables = "\n".join(_lines(results))
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}"


def _lines(results: Results) -> Iterator[str]:
    yield from _goal_table(results)
    for case, entry in results.get("naive", {}).items():
        yield from ("", f"### an epoch over {entry['rows']} rows of {entry['text']}: {EPOCHS[case]}", "")
        yield from _epoch_table(entry)
        yield from _circumstances(entry)
    for kind in ("training", "gpu"):
        for case, entry in results.get(kind, {}).items():
            yield from ("", f"### {kind}, {case}", "")
            yield from _training_table(entry)
            yield from _circumstances(entry)
    for operation in ("merge", "consolidate"):
        for size in (SMALL, LARGE):
            if entry := results.get(operation, {}).get(size):
                yield from ("", f"### {operation}, {size} layers, {entry['model_bytes'] / 1e9:.1f} GB", "")
                yield from _checkpoint_table(entry)
                yield from _circumstances(entry)
    if entry := results.get("dataset", {}).get(TEXT):
        yield from ("", f"### dataset, {entry['rows']:,} raw rows of {entry['tokens_per_row']:.0f} tokens", "")
        yield from _dataset_table(entry)
        yield from _circumstances(entry)
    if entry := results.get("layouts", {}).get("steps"):
        yield from ("", "### layouts, a step", "")
        yield from _steps_table(entry)
        yield from _circumstances(entry)
    if entry := results.get("layouts", {}).get("scaling"):
        yield from ("", "### layouts, MB that a rank sends in a step while rows grow with the ranks", "")
        yield from _scaling_table(entry)
        yield from _circumstances(entry)
    if entry := results.get("pipeline", {}).get("idle"):
        yield from ("", "### pipelines, idle share of a step", "")
        yield from _idle_table(entry)
        yield from _circumstances(entry)
    for verb, entry in sorted(results.get("s3", {}).items()):
        yield from ("", f"### S3, {verb} of {entry['tree_bytes'] / 1e9:.1f} GB", "")
        yield f"8 files of {entry['large_mib']} MiB and 200 of 64 KiB."
        yield ""
        yield from _transfer_table(entry)
        yield from _circumstances(entry)
    if entries := results.get("loading"):
        yield from ("", "### loading the base model", "")
        yield from _loading_table(entries)
        yield from _circumstances(entries[next(size for size in reversed(LOADED) if size in entries)])
    yield from _scale_section(results)


def _scale_section(results: Results) -> Iterator[str]:
    entry = results.get("scale", {}).get("figures")
    if entry is None:
        return
    yield from ("", "### Scale", "")
    yield "Commands: medians of 5 rounds. Slurm is real; its nodes are processes of this machine."
    yield ""
    yield _row("", "wall", "CPU")
    yield "|---|---|---|"
    for figure in entry["figures"]:
        cpu = "" if figure["cpu"] is None else f"{figure['cpu']:.2f} s"
        yield _row(figure["what"], f"{figure['wall']:.2f} s", cpu)
    yield ""
    yield f"Other programs ran too: load average {entry['load'][0]:.0f} to {entry['load'][1]:.0f} meanwhile."
    yield from _circumstances(entry)


def _loading_table(results: Mapping[str, Entry]) -> Iterator[str]:
    yield _row("", "", "wall", "CPU time of all ranks", "peak memory of all ranks", "against the model")
    yield "|---|---|---|---|---|---|"
    for size in LOADED:
        entry = results.get(size, {"contenders": {}})
        for name in entry["contenders"]:
            yield _row(
                size,
                name,
                f"{goals.median(entry, name, 'wall'):.1f} s",
                f"{goals.median(entry, name, 'cpu'):.1f} s",
                f"{goals.peak_mb(entry, name):,.0f} MB",
                f"{goals.host_memory_ratio(entry, name):.3f}x",
            )


def _steps_table(entry: Entry) -> Iterator[str]:
    yield _row("", "ranks", "CPU seconds of all ranks over one rank's", "MB sent by a rank")
    yield "|---|---|---|---|"
    for name, contender in entry["contenders"].items():
        sent = f"{goals.median(entry, name, 'sent') / 1e6:.2f}"
        yield _row(name, str(contender["ranks"]), _spread(goals.layout_ratios(entry, name), "{:.2f}x"), sent)


def _scaling_table(entry: Entry) -> Iterator[str]:
    ranks = list(next(iter(entry["sent"].values())))
    yield _row("", *(f"{number} rank{'s' * (number != '1')}" for number in ranks))
    yield "|---|" + "---|" * len(ranks)
    for name, sent in entry["sent"].items():
        yield _row(name, *(f"{sent[number] / 1e6:.2f}" for number in ranks))


def _idle_table(entry: Entry) -> Iterator[str]:
    yield _row("PP", "micro batches", "schedule", "formula", "found", "busiest rank over the mean")
    yield "|---|---|---|---|---|---|"
    for case in entry["cases"]:
        shares = (f"{100 * case[what]:.1f} %" for what in ("formula", "idle"))
        yield _row(
            str(case["ranks"]), str(case["micro_batches"]), f"`{case['schedule']}`", *shares, f"{case['uneven']:.2f}"
        )


def _goal_table(results: Results) -> Iterator[str]:
    reached = goals.reached(results)
    yield _row("path", "must reach", "aim for", "reached")
    yield "|---|---|---|---|"
    for goal in GOALS:
        must, aim = ("" if bound is None else goal.form.format(bound) for bound in (goal.must, goal.aim))
        figure = _figure(goal, results, reached[goal]) if goal in reached else _MISSING
        missed = goal in reached and not goal.met(reached[goal])
        yield _row(goal.what, must, aim, f"{figure}, missed" if missed else figure)


def _figure(goal: Goal, results: Results, value: float) -> str:
    # rounds may differ widely: a median alone would promise too much
    if goal.value is goals.wall_ratio:
        return _spread(goals.ratios(results[goal.benchmark][goal.sizes[0]], KIT), goal.form)
    if goal.value is goals.epoch_ratio:
        return _spread(goals.epoch_ratios(results[goal.benchmark][goal.sizes[0]]), goal.form)
    if goal.value is goals.transfer_ratio:
        return _spread(goals.transfer_ratios(results[goal.benchmark][goal.sizes[0]]), goal.form)
    if goal.value is goals.training_ratio:
        return _spread(goals.training_ratios(results[goal.benchmark][goal.sizes[0]]), goal.form)
    return goal.form.format(value)


def _epoch_table(entry: Entry) -> Iterator[str]:
    yield _row("", "CPU seconds of all steps", "last loss")
    yield "|---|---|---|"
    for name in entry["contenders"]:
        seconds, loss = (goals.median(entry, name, what) for what in ("all_steps_cpu", "last_loss"))
        yield _row(name, f"{seconds:,.0f}", f"{loss:.3f}")


def _training_table(entry: Entry) -> Iterator[str]:
    rows = f"{entry['rows']} row{'s' * (entry['rows'] > 1)}"
    yield (
        f"{entry['method']}, {entry['precision']}, {rows} of {entry['max_length']} tokens"
        f" a step, {entry['documents']} documents a row."
    )
    yield ""
    second = "CPU second" if entry["instance_type"] == "local" else "second"
    memory = "peak memory beyond the imports" if entry["instance_type"] == "local" else "peak memory of the GPU"
    yield _row("", f"tokens per {second}", "over the fastest peer", memory, "last loss")
    yield "|---|---|---|---|---|"
    for name in entry["contenders"]:
        yield _row(
            name,
            f"{goals.tokens_per_second(entry, name):,.0f}",
            _spread(goals.training_ratios(entry, name), "{:.2f}x") if len(entry["contenders"]) > 1 else "",
            f"{goals.median(entry, name, 'beyond_imports') / 1e6:,.0f} MB",
            f"{goals.median(entry, name, 'last_loss'):.4f}",
        )
    yield from (f"| {name} | {_MISSING}: {reason} | | | |" for name, reason in entry["not_measured"].items())


def _checkpoint_table(entry: Entry) -> Iterator[str]:
    yield _row("", "wall", f"against `{COPY}`", "CPU s per GB", "peak memory", "written", "same tensors")
    yield "|---|---|---|---|---|---|---|"
    contenders = entry["contenders"]
    for name, contender in contenders.items():
        same = contender["output"]["tensors"] == contenders[KIT]["output"]["tensors"]
        yield _row(
            name,
            f"{goals.median(entry, name, 'wall'):.1f} s",
            _spread(goals.ratios(entry, name), "{:.2f}x"),
            f"{goals.cpu_per_gb(entry, name):.2f}",
            f"{goals.peak_mb(entry, name):,.0f} MB",
            f"{goals.median(entry, name, 'written') / 1e9:.1f} GB",
            "" if name in (COPY, KIT) else "yes" if same else "no",
        )
    yield from (f"| {name} | {_MISSING}: {reason} | | | | | |" for name, reason in entry["not_measured"].items())


def _transfer_table(entry: Entry) -> Iterator[str]:
    yield _row("", "wall", "rate over s5cmd's", "CPU time", "peak memory")
    yield "|---|---|---|---|---|"
    for name in entry["contenders"]:
        yield _row(
            name,
            f"{goals.median(entry, name, 'wall'):.1f} s",
            _spread(goals.transfer_ratios(entry, name), "{:.2f}x") if S5CMD in entry["contenders"] else "",
            f"{goals.median(entry, name, 'cpu'):.1f} s",
            f"{goals.peak_mb(entry, name):,.0f} MB",
        )
    yield from (f"| {name} | {_MISSING}: {reason} | | | |" for name, reason in entry["not_measured"].items())


def _dataset_table(entry: Entry) -> Iterator[str]:
    yield _row("", "rows per CPU second", "the kit's rate over it", "whole CPU time", "peak memory", "unfilled slots")
    yield "|---|---|---|---|---|---|"
    kit = goals.rates(entry, KIT)
    for name in entry["contenders"]:
        if REPEATED.format(name) in entry["contenders"]:
            rates = goals.rates(entry, name)
            yield _row(
                name,
                _spread(rates, "{:,.0f}"),
                "" if name == KIT else _spread([one / other for one, other in zip(kit, rates, strict=True)], "{:.1f}x"),
                f"{goals.median(entry, name, 'cpu'):.1f} s",
                f"{goals.peak_mb(entry, name):,.0f} MB",
                f"{goals.unfilled_percent(entry, name):.2f} %",
            )
    yield from (f"| {name} | {_MISSING}: {reason} | | | | |" for name, reason in entry["not_measured"].items())


def _circumstances(entry: Entry) -> Iterator[str]:
    machine = entry["machine"]
    yield ""
    yield (
        f"`{entry['command']}` on {machine['date']}: {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory_gb']:.0f} GB of memory, Linux {machine['kernel']}, {machine['file_system']}, "
        f"Python {machine['python']}."
    )
    versions = (
        f"{name}: {', '.join(f'{package} {version}' for package, version in packages.items())}"
        for name, packages in entry["versions"].items()
    )
    yield f"Versions: {'; '.join(versions)}."


def _spread(values: list[float], form: str) -> str:
    """The median, and the smallest and largest value."""
    if len(values) == 1:
        return f"{form.format(values[0])} (one round)"
    return f"{form.format(statistics.median(values))} ({form.format(min(values))}–{form.format(max(values))})"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    DOCUMENT.write_text(document(DOCUMENT.read_text(encoding="utf-8"), load()), encoding="utf-8")
