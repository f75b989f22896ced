"""The results file of the soak, and its table in docs/reliability.md. Each invocation adds an entry."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hyperpod_ft import publish

BEGIN, END = "<!-- made by `python -m benchmarks.soak` -->", "<!-- end -->"
STAGES = (
    *("submit", "env", "download", "dataset", "precompile", "train", "consolidate", "merge", "generate"),
    *("waiting", "no job"),  # between jobs; before and after them
)

Entry = Mapping[str, Any]


def load(path: Path) -> list[dict[str, Any]]:
    """The entries so far, oldest first."""
    return list(json.loads(path.read_text(encoding="utf-8"))["invocations"]) if path.exists() else []


def save(path: Path, entry: Entry) -> None:
    """Write an invocation's entry, in the place of the one with its start."""
    others = [known for known in load(path) if known["started"] != entry["started"]]
    publish.write_json(path, {"invocations": [*others, entry]})


def document(text: str, entries: Sequence[Entry]) -> str:
    """The page with the text between its markers replaced."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n" + "\n".join(_lines(entries)) + f"\n\n{END}{after}"


def _lines(entries: Sequence[Entry]) -> Iterator[str]:
    counts: dict[str, Counter[str]] = {}
    for entry in entries:
        for kind, by_stage in entry["faults"].items():
            counts.setdefault(kind, Counter()).update(by_stage)
    total = sum(sum(by_stage.values()) for by_stage in counts.values())
    runs = sum((Counter(entry["runs"]) for entry in entries), Counter[str]())
    failures = [failure for entry in entries for failure in entry["failures"]]
    cases = ", ".join(f"{number} of `{case}`" for case, number in sorted(runs.items()))
    whole = sum(runs.values())
    yield f"**{total:,} faults** in {whole} whole {'run' if whole == 1 else 'runs'} ({cases or 'none yet'});"
    yield f"failures found: {len(failures)}."
    yield ""
    yield f"| fault | {' | '.join(STAGES)} | in all |"
    yield f"|---|{'---|' * (len(STAGES) + 1)}"
    for kind, by_stage in sorted(counts.items()):
        cells = [str(by_stage[stage] or "") for stage in STAGES]
        yield f"| {kind} | {' | '.join(cells)} | {sum(by_stage.values())} |"
    columns = [sum(by_stage[stage] for by_stage in counts.values()) for stage in STAGES]
    yield f"| in all | {' | '.join(str(column) for column in columns)} | {total:,} |"
    yield ""
    yield "| invocation | seed | kit | minutes | runs | faults | failures |"
    yield "|---|---|---|---|---|---|---|"
    for entry in entries:
        number = sum(sum(by_stage.values()) for by_stage in entry["faults"].values())
        yield (
            f"| {entry['started']} | {entry['seed']} | {entry['commit']} | {entry['seconds'] / 60:.0f} |"
            f" {sum(entry['runs'].values())} | {number} | {len(entry['failures'])} |"
        )
