"""The results file of the soak, and the page benchmarks/results/soak.md. Each invocation adds an entry."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hyperpod_ft import publish

STAGES = (
    *("submit", "env", "download", "certify", "dataset", "precompile", "train", "consolidate", "merge", "generate"),
    *("waiting", "no job"),  # between jobs; before and after them
)

_INTRODUCTION = """\
# Soak

Made by `python -m benchmarks.soak`. It starts whole small runs of every stage (`lora`, `full` and `dpo` on one node,
`two-nodes`, `fewer-nodes` with `cluster.min_nodes` on one to four, and engine `neuron` on CPUs with stand-ins), has
faults hit them at random moments, resumes them until all is done, and compares each with an undisturbed run. A failure
is counted unless, after each run,

- model, adapter, samples, downloaded files and rows have the same bytes; losses, learning rates, gradient norms and
  records are the same, apart from times, rates, job ids and how often training was started; for `fewer-nodes`, numbers
  are within 0.1 % instead, and what is computed from them may have other bytes;
- no process of the run is left, and no temporary name but those of [leftovers](../../docs/when-something-fails.md);
- no two jobs of a stage were in Slurm at once, no stage was done twice, and `jobs.json` has every job once (a
  submission or a slurmctld that was killed may lose its last ones);
- no command ended with a traceback or had to be killed, and nothing stood still for four minutes;
- each hang that was reported is of a process that had been stopped for seconds.

Faults: SIGKILL to a random process of a job, to slurmctld or slurmd; a lost node (all its processes, down for up to 8
s, or 40 s with `min_nodes`); SIGSTOP for up to 15 s; hangs (SIGSTOP of a rank or torchrun for ever; the limit is 8 s
instead of 60 s) and slow ranks (stopped for up to 1.6 s, again and again); a full volume for up to 10 s; I/O errors
below the root, of 0.01 % to 100 % of the calls, for up to 8 s; clocks of processes that jump by 1 s to 3 days;
`cancel`, `submit` and two submissions at random moments; scancel, requeue and the notice of the time limit by hand.
Columns are the stage whose job was running. A fault that hit nothing is not counted.

The soak itself kills a torchrun that it has stopped for good if its step daemon was killed too: the kit leaves it.

Not injected: loss of power, errors of a device below the file system, clocks of slurmctld, slurmd and munged, lost
packets, a volume whose network hangs, and failing accelerators.

The counted failures are what the checks reported at the time: faults of the kit, which have been corrected, and
mistakes of the checks themselves.
"""

Entry = Mapping[str, Any]


def load(path: Path) -> list[dict[str, Any]]:
    """The entries so far, oldest first."""
    return list(json.loads(path.read_text(encoding="utf-8"))["invocations"]) if path.exists() else []


def save(path: Path, entry: Entry) -> None:
    """Write an invocation's entry, in the place of the one with its start."""
    others = [known for known in load(path) if known["started"] != entry["started"]]
    publish.write_json(path, {"invocations": [*others, entry]})


def page(entries: Sequence[Entry]) -> str:
    """What the soak does, and tables of all its invocations."""
    return _INTRODUCTION + "\n" + "\n".join(_lines(entries)) + "\n"


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
    moves = sum(entry.get("moves", 0) for entry in entries)
    yield f"failures found: {len(failures)}. Training went on with another number of nodes {moves} times."
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
