"""The recorded results as tables, written between the markers of benchmarks/performance.md and docs/reliability.md.

python -m benchmarks.table
"""

import json
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from benchmarks import goals, reliability
from benchmarks.command import RESULTS, ROOT
from benchmarks.goals import (
    ALONE,
    CONVERSATIONS,
    COPY,
    EPOCHS,
    KIT,
    LARGE,
    LOADED,
    NAIVE,
    PLAIN_TRL,
    REPEATED,
    S5CMD,
    SMALL,
    TEXT,
    Entry,
    Results,
)

PERFORMANCE, RELIABILITY = ROOT / "benchmarks" / "performance.md", ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- made by `python -m benchmarks.table` -->", "<!-- end -->"


def load(directory: Path = RESULTS) -> Results:
    """The results files by benchmark."""
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(directory.glob("*.json"))}


def documents(results: Results) -> dict[Path, str]:
    """The documents, each with the text between its markers replaced."""
    made = {
        PERFORMANCE: ([_machines(results)], *_sections(results), *_failures(results)),
        RELIABILITY: (reliability.outcomes(),),
    }
    return {path: _between_markers(path.read_text(encoding="utf-8"), sections) for path, sections in made.items()}


def _between_markers(text: str, sections: Iterable[Iterable[str]]) -> str:
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    joined = "\n\n".join("\n".join(lines) for lines in sections)
    return f"{before}{BEGIN}\n\n{joined}\n\n{END}{after}"


def _machines(results: Results) -> str:
    """Where everything was measured, one sentence: each entry's own line adds the date and the processor."""
    entries = (entry for sizes in results.values() for entry in sizes.values() if "machine" in entry)
    found = dict.fromkeys(
        f"{machine['cores']} cores, {machine['memory_gb']:.0f} GB of memory, Linux {machine['kernel']},"
        f" {machine['file_system']}, Python {machine['python']}"
        for machine in (entry["machine"] for entry in entries)
    )
    return f"Measured on {'; or on '.join(found)}."


def _sections(results: Results) -> Iterator[list[str]]:
    """The sections that have results: a heading, a table, and how it was measured."""
    for kind, title in (("training", "Training on one CPU core"), ("gpu", "Training on one GPU")):
        if entries := results.get(kind):
            table, how = _training_table(entries), _circumstances(entries.values(), takes_several=True)
            yield [f"### {title}", "", *table, *how]
    if entries := results.get("naive"):
        yield ["### Naive settings", "", *_epochs(entries), *_circumstances(entries.values())]
    checkpoints = {
        f"{operation}, {size} layers, {results[operation][size]['model_bytes'] / 1e9:.1f} GB": results[operation][size]
        for operation in ("merge", "consolidate")
        for size in (SMALL, LARGE)
        if size in results.get(operation, {})
    }
    if checkpoints:
        table = _checkpoint_table(checkpoints)
        yield ["### Merge and consolidate", "", *table, *_circumstances(checkpoints.values())]
    for case, rows in ((TEXT, "raw rows"), (CONVERSATIONS, "conversations of four turns")):
        if entry := results.get("dataset", {}).get(case):
            title = f"### Dataset, {entry['rows']:,} {rows} of {entry['tokens_per_row']:.0f} tokens"
            yield [title, "", *_dataset_table(entry), *_circumstances([entry])]
    if entry := results.get("layouts", {}).get("steps"):
        yield ["### Layouts, a step", "", *_steps_table(entry), *_circumstances([entry])]
    if entry := results.get("pipeline", {}).get("idle"):
        yield ["### Pipelines, idle share of a step", "", *_idle_table(entry), *_circumstances([entry])]
    if entries := results.get("s3"):
        yield ["### S3 transfers", "", *_transfer_table(entries), *_circumstances(entries.values())]
    if entries := results.get("loading"):
        yield ["### Loading the base model", "", *_loading_table(entries), *_circumstances(entries.values())]
    if entry := results.get("scale", {}).get("figures"):
        yield ["### Scale", "", *_scale_list(entry), *_circumstances([entry])]


def _failures(results: Results) -> Iterator[list[str]]:
    """The sections about failures."""
    restarts = results["restarts"]
    yield ["### Restarts", "", *reliability.restarts(restarts), *_circumstances(restarts.values())]
    yield ["### Injected failures", "", *reliability.injected(results["soak"])]


def _training_table(entries: Mapping[str, Entry]) -> Iterator[str]:
    first = next(iter(entries.values()))
    on_cpu = first["instance_type"] == "local"
    peers = [name for name in goals.peers_of(first) if name != PLAIN_TRL]
    rate, memory = ("tokens per CPU second", "MB beyond the imports") if on_cpu else ("tokens/s", "MB of the GPU")
    yield _row("", f"{rate}: kit", *peers, "kit over the fastest", f"{memory}: kit", *peers)
    yield "|---" * (4 + 2 * len(peers)) + "|"
    for case, entry in entries.items():
        names = [name for name in (KIT, *peers) if name in entry["contenders"]]
        rates = [f"{goals.tokens_per_second(entry, name):,.0f}" for name in names]
        peaks = [f"{goals.median(entry, name, 'beyond_imports') / 1e6:,.0f}" for name in names]
        over = _spread(goals.training_ratios(entry, KIT), "{:.2f}x") if len(names) > 1 else ""
        yield _row(case, *rates, over, *peaks)
    for case, entry in entries.items():
        if ratios := goals.overheads_of_engine_trl(entry):
            yield ""
            times = _spread(ratios, "{:.2f}x")
            yield f"{case}: a step of engine `trl` over that of a plain TRL script with its settings: {times}."


def _epochs(entries: Mapping[str, Entry]) -> Iterator[str]:
    for case, entry in entries.items():
        seconds = {name: goals.median(entry, name, "all_steps_cpu") for name in (NAIVE, KIT)}
        losses = {name: goals.median(entry, name, "last_loss") for name in (NAIVE, KIT)}
        yield (
            f"An epoch over {entry['rows']} rows of {entry['text']}, {EPOCHS[case]}:\n{seconds[NAIVE]:,.0f} against"
            f" {seconds[KIT]:,.0f} CPU seconds, {_spread(goals.epoch_ratios(entry), '{:.1f}x')}; last loss"
            f" {losses[NAIVE]:.3f} against {losses[KIT]:.3f}."
        )


def _checkpoint_table(entries: Mapping[str, Entry]) -> Iterator[str]:
    yield _row("", "", "wall", f"`{COPY}`", "wall over it", "CPU s per GB", "peak memory")
    yield "|---|---|---|---|---|---|---|"
    for title, entry in entries.items():
        copied = f"{goals.median(entry, COPY, 'wall'):.1f} s"
        for name, contender in entry["contenders"].items():
            if name == COPY:
                continue
            same = contender["output"]["tensors"] == entry["contenders"][KIT]["output"]["tensors"]
            yield _row(
                title,
                name if same else f"{name}, other tensors",
                f"{goals.median(entry, name, 'wall'):.1f} s",
                copied,
                _spread(goals.ratios(entry, name), "{:.2f}x"),
                f"{goals.cpu_per_gb(entry, name):.2f}",
                f"{goals.peak_mb(entry, name):,.0f} MB",
            )


def _dataset_table(entry: Entry) -> Iterator[str]:
    yield _row("", "rows per CPU second", "the kit's rate over it", "peak memory", "unfilled slots")
    yield "|---|---|---|---|---|"
    kit = goals.rates(entry, KIT)
    for name in entry["contenders"]:
        if REPEATED.format(name) in entry["contenders"]:
            rates = goals.rates(entry, name)
            yield _row(
                name,
                f"{statistics.median(rates):,.0f}",
                "" if name == KIT else _spread([one / other for one, other in zip(kit, rates, strict=True)], "{:.1f}x"),
                f"{goals.peak_mb(entry, name):,.0f} MB",
                f"{goals.unfilled_percent(entry, name):.2f} %",
            )


def _steps_table(entry: Entry) -> Iterator[str]:
    yield _row("", "CPU seconds over one rank's", "MB sent by a rank")
    yield "|---|---|---|"
    for name in (name for name in entry["contenders"] if name != ALONE):
        sent = f"{goals.median(entry, name, 'sent') / 1e6:.2f}"
        yield _row(name, _spread(goals.layout_ratios(entry, name), "{:.2f}x"), sent)


def _idle_table(entry: Entry) -> Iterator[str]:
    yield _row("PP", "micro batches", "schedule", "formula", "found", "busiest rank over the mean")
    yield "|---|---|---|---|---|---|"
    for case in entry["cases"]:
        shares = (f"{100 * case[what]:.1f} %" for what in ("formula", "idle"))
        yield _row(
            str(case["ranks"]), str(case["micro_batches"]), f"`{case['schedule']}`", *shares, f"{case['uneven']:.2f}"
        )


def _transfer_table(entries: Mapping[str, Entry]) -> Iterator[str]:
    sizes = next(iter(entries.values()))
    yield f"{sizes['tree_bytes'] / 1e9:.1f} GB: 8 files of {sizes['large_mib']} MiB and 200 of 64 KiB."
    yield ""
    yield _row("", *(f"{verb}: wall | rate over s5cmd's | peak memory" for verb in entries))
    yield "|---" * (1 + 3 * len(entries)) + "|"
    for name in dict.fromkeys(name for entry in entries.values() for name in entry["contenders"]):
        cells = [cell for entry in entries.values() for cell in _transfer(entry, name)]
        yield _row(name, *cells)


def _transfer(entry: Entry, name: str) -> tuple[str, str, str]:
    if name not in entry["contenders"]:
        return "", "", ""
    compared = name != S5CMD and S5CMD in entry["contenders"]
    return (
        f"{goals.median(entry, name, 'wall'):.1f} s",
        _spread(goals.transfer_ratios(entry, name), "{:.2f}x") if compared else "",
        f"{goals.peak_mb(entry, name):,.0f} MB",
    )


def _loading_table(entries: Mapping[str, Entry]) -> Iterator[str]:
    """Memory alone: no round was on an idle machine, and transformers maps files, which it reads later."""
    names = list(dict.fromkeys(name for entry in entries.values() for name in entry["contenders"]))
    yield _row("peak memory of all ranks, over the model's", *names)
    yield "|---" * (1 + len(names)) + "|"
    for size in LOADED:
        if entry := entries.get(size):
            peaks = ((goals.peak_mb(entry, name), goals.host_memory_ratio(entry, name)) for name in names)
            yield _row(size, *(f"{peak:,.0f} MB ({ratio:.3f}x)" for peak, ratio in peaks))


def _scale_list(entry: Entry) -> Iterator[str]:
    for figure in entry["figures"]:
        yield f"- {figure['what']}: {figure['wall']:.2f} s"
    yield ""
    yield f"Wall time; load average {entry['load'][0]:.0f} to {entry['load'][1]:.0f} meanwhile."


def _circumstances(entries: Iterable[Entry], *, takes_several: bool = False) -> Iterator[str]:
    """Who could not be measured; when, where and by which commands the others were.

    `takes_several`: one call of the benchmark can measure several of its cases.
    """
    entries = list(entries)
    missing = {name: reason for entry in entries for name, reason in entry.get("not_measured", {}).items()}
    for name, reason in missing.items():
        yield ""
        yield f"{name} was not measured: {reason}."
    commands: dict[str, list[str]] = {}
    for entry in entries:
        where = f"{entry['machine']['date']}, {_short(entry['machine']['cpu'])}"
        commands.setdefault(where, []).append(entry["command"])
    for where, of_place in commands.items():
        yield ""
        yield f"{where}:"
        lines = list(dict.fromkeys(of_place))
        *others, last = _joined(lines) if takes_several else lines
        yield from (f"`{line}`," for line in others)
        yield f"`{last}`"


def _joined(lines: list[str]) -> list[str]:
    """Command lines that differ in one word alone, the case, as one with all of its values in braces."""
    words = [line.split() for line in lines]
    if len({len(each) for each in words}) > 1:
        return lines
    columns = [list(dict.fromkeys(column)) for column in zip(*words, strict=True)]
    if sum(len(column) > 1 for column in columns) != 1:
        return lines
    return [" ".join(column[0] if len(column) == 1 else f"{{{','.join(column)}}}" for column in columns)]


def _short(cpu: str) -> str:
    return re.sub(r"\(R\)| Processor", "", cpu)


def _spread(values: list[float], form: str) -> str:
    """The median, and the smallest and largest value."""
    if len(values) == 1:
        return f"{form.format(values[0])} (one round)"
    return f"{form.format(statistics.median(values))} ({form.format(min(values))}–{form.format(max(values))})"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    for path, text in documents(load()).items():
        path.write_text(text, encoding="utf-8")
