"""Soak: whole runs on local clusters, with faults at random moments, compared with an undisturbed run.

python -m benchmarks.soak --faults 300 --workers 2 [--neuron-python .venv-neuron/bin/python]

Needs root (it mounts a small volume for each worker), Slurm and gcc. Each worker has its own cluster and volume. It
adds its counts to benchmarks/results/soak.json after every run, and writes the tables of all invocations to soak.md
beside it. SIGTERM ends it after the runs at work. Exit status 1 if a run differed from the undisturbed one,
or left something behind.
"""

import argparse
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.command import RESULTS, ROOT
from benchmarks.soaking import outcome, shim, tally
from benchmarks.soaking.cases import CASES, NEURON, neuron_environment
from benchmarks.soaking.faults import CONTROLLER_KILLED, Fault
from benchmarks.soaking.site import Site
from benchmarks.soaking.user import HangError, User
from hyperpod_ft.runs.records import utc_now
from hyperpod_ft.runs.results import places
from hyperpod_ft.runs.run import Run

_QUIET_S = 60.0  # how long the processes of ended jobs may take to end


@dataclass
class Soak:
    """The counts of one invocation, shared by its workers."""

    options: argparse.Namespace
    neuron_python: Path | None
    started: str = field(default_factory=utc_now)
    faults: dict[str, Counter[str]] = field(default_factory=dict)
    runs: Counter[str] = field(default_factory=Counter)
    moves: int = 0  # of trainings, to another number of nodes
    failures: list[str] = field(default_factory=list)
    expected: dict[str, dict[str, Any]] = field(default_factory=dict)
    spans: dict[str, dict[str, float]] = field(default_factory=dict)
    _clock: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def total(self) -> int:
        return sum(sum(by_stage.values()) for by_stage in self.faults.values())

    @property
    def is_over(self) -> bool:
        return bool(self.total >= self.options.faults or time.monotonic() - self._clock > 60 * self.options.minutes)

    def say(self, text: str) -> None:
        with self._lock:
            print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)

    def finish_run(self, worker: str, user: User, moves: int) -> None:
        """Count a run, its faults and what was found, and save all counts."""
        case = user.case
        with self._lock:
            self.runs[case] += 1
            self.moves += moves
            # without the places of this machine
            self.failures += [f"{case}: " + re.sub(r"/([^\s/]+/)+", ".../", text) for text in user.found]
            for fault in user.injected:
                self.faults.setdefault(fault.kind, Counter())[fault.stage] += 1
            entry = {
                "started": self.started,
                "seed": self.options.seed,
                "commit": _commit(),
                "seconds": round(time.monotonic() - self._clock),
                "runs": dict(self.runs),
                "faults": {kind: dict(by_stage) for kind, by_stage in sorted(self.faults.items())},
                "moves": self.moves,
                "failures": self.failures,
            }
            tally.save(self.options.results, entry)
            results = self.options.results
            results.with_suffix(".md").write_text(tally.page(tally.load(results)), encoding="utf-8")
        self.say(
            f"{worker}: {case} done after {len(user.injected)} faults, {self.total} so far, found:"
            f" {user.found or 'nothing'}"
        )


def work(soak: Soak, number: int, library: Path) -> None:
    """Run cases one after the other on an own site until the soak is over."""
    worker = f"w{number}"
    rng = random.Random(f"{soak.options.seed} {number}")  # noqa: S311 - moments of faults
    site = Site(soak.options.work / worker, library)

    def say(fault: Fault) -> None:
        soak.say(f"{worker}: {fault.kind} in {fault.stage} {fault.detail}".rstrip())

    try:
        site.open()
        while not soak.is_over:
            case = rng.choice(soak.options.cases)
            if case not in soak.expected:
                first = User(site, case, rng, say, soak.neuron_python, disturbed=False)
                _run(soak, site, worker, first)
                soak.spans[case] = first.spans
            user = User(site, case, rng, say, soak.neuron_python, spans=soak.spans.get(case, {}))
            _run(soak, site, worker, user)
    except BaseException:  # in a thread: nothing else would end the soak as failed
        soak.failures.append(f"{worker}: this program failed: {traceback.format_exc()[-1500:]}")
        soak.say(soak.failures[-1])
    finally:
        site.close()


def _run(soak: Soak, site: Site, worker: str, user: User) -> None:
    """One run, from an empty root to the comparison."""
    _clear(site, user.rng)
    soak.say(f"{worker}: {user.case} starts{'' if user.disturbed else ', undisturbed'}")
    before = set(site.known_jobs())
    run: Run | None
    try:
        run = user.go()
    except HangError as error:
        user.found.append(str(error))
        user.faults.end_all()
        site.scancel("--user=root")
        run = user._run()
    found = user.found
    if left := site.wait_until_quiet(_QUIET_S):
        found.append(f"processes left: {left}")
    if run is None or any(not run.journal.is_done(stage.name) for stage in run.plan.stages):
        found.append("the run is not done")
    else:
        result = outcome.outcome(run)
        with_losses = soak.expected.setdefault(user.case, result)
        found += outcome.differences(with_losses, result)
        found += [f"left: {name}" for name in outcome.leftovers(run)]
        found += outcome.work_done_twice(run)
        known = {job_id: name for job_id, name in site.known_jobs().items() if job_id not in before}
        slurm_forgot = any(fault.kind == CONTROLLER_KILLED for fault in user.injected)
        found += outcome.lost_and_doubled(run, known, user.killed_submissions, slurm_forgot)
    if run is not None:
        for text, times in outcome.tracebacks(run).items():
            soak.say(f"{worker}: traceback, {times} times: {text}")
    if found:
        kept = soak.options.work / "failures" / f"{soak.started.replace(':', '')}-{worker}-{soak.total}"
        shutil.copytree(site.root / "runs", kept, dirs_exist_ok=True)
        (kept / "found.txt").write_text("\n".join(found))
    if user.disturbed:
        soak.finish_run(worker, user, len(places.read(run.paths)) - 1 if run else 0)
    elif found:
        raise RuntimeError(f"undisturbed {user.case}: {found}")


def _clear(site: Site, rng: random.Random) -> None:
    """Empty the root, but for the copies of the kit's code; mostly the record of the environment is kept too."""
    records = list((site.root / "records").glob("env-*.json")) if rng.random() < 0.8 else []
    kept = {path: path.read_bytes() for path in records}
    for path in site.root.glob("*"):
        if path.name != "code":
            shutil.rmtree(path)
    for path, content in kept.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=300, help="end after as many faults; default 300")
    parser.add_argument("--minutes", type=float, default=600, help="or after so long")
    parser.add_argument("--workers", type=int, default=2, help="runs side by side; default 2")
    parser.add_argument("--seed", type=int, default=None, help="of the moments and kinds of faults; default: random")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), help="default: all that can run")
    parser.add_argument("--neuron-python", type=Path, help="that of scripts/test-neuron.sh, for engine neuron")
    parser.add_argument("--work", type=Path, default=ROOT / ".bench" / "soak", help="clusters, volumes, failed runs")
    parser.add_argument("--results", type=Path, default=RESULTS / "soak.json", help="the results file, beside the page")
    options = parser.parse_args()
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(1 << 31)
    print(f"seed {options.seed}", flush=True)
    options.work.mkdir(parents=True, exist_ok=True)
    options.work = options.work.resolve()
    options.cases = options.cases or [case for case in CASES if case != NEURON or options.neuron_python]
    neuron_python = options.neuron_python and neuron_environment(options.work, options.neuron_python.absolute())
    soak = Soak(options, neuron_python)
    library = shim.build(options.work)
    # SIGTERM: end after the runs at work
    signal.signal(signal.SIGTERM, lambda *_: setattr(options, "faults", 0))
    threads = [threading.Thread(target=work, args=(soak, number, library)) for number in range(1, options.workers + 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"seed {options.seed}: {soak.total} faults, {sum(soak.runs.values())} runs, failures: {len(soak.failures)}")
    return 1 if soak.failures else 0


if __name__ == "__main__":
    sys.exit(main())
