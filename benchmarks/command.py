"""Common parts of the benchmark commands: options, the peers' environments, the results file, the verdict."""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import environments, goals, machine
from benchmarks.goals import KIT
from benchmarks.measure import CommandError

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
_SCRATCH = ROOT / ".bench"


@dataclass(frozen=True)
class Peer:
    """A program that the kit is compared with: its environment, its driver in `peers/`, the packages to report."""

    environment: str
    driver: str
    packages: tuple[str, ...]


def parser(description: str, *, peers: bool = True) -> argparse.ArgumentParser:
    """The options of a benchmark; `peers`: the kit is compared with other programs."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--rounds", type=int, default=3, help="number of times each contender runs; default 3")
    options.add_argument("--work", type=Path, default=_SCRATCH / "work", help="directory for temporary data")
    if peers:
        options.add_argument("--peers", default="all", help="`all`, `none`, or names separated by commas")
        options.add_argument("--environments", type=Path, default=_SCRATCH, help="where the peers are installed")
    options.add_argument("--results", type=Path, default=RESULTS, help="directory of the results file")
    return options


@dataclass(frozen=True)
class Installed:
    """The interpreters of installed peers, why others are missing, and the versions of all, including the kit."""

    pythons: dict[str, Path]
    missing: dict[str, str]
    versions: dict[str, dict[str, str]]


def install(names: str, peers: Mapping[str, Peer], directory: Path, kit_packages: tuple[str, ...]) -> Installed:
    """Create the environments of the peers in `--peers`, as far as possible."""
    wanted = {"all": list(peers), "none": []}.get(names, names.split(","))
    if unknown := set(wanted) - set(peers):
        sys.exit(f"--peers: unknown: {', '.join(sorted(unknown))}; known: {', '.join(peers)}")
    installed = Installed({}, {}, {KIT: environments.versions(Path(sys.executable), kit_packages)})
    for name in wanted:
        try:
            python = environments.python_of(peers[name].environment, directory)
            installed.versions[name] = environments.versions(python, peers[name].packages)
            installed.pythons[name] = python
        except CommandError as error:
            print(f"{name} cannot be measured: {error}", flush=True)
            installed.missing[name] = str(error)
    return installed


def typed(module: str, options: argparse.Namespace, *arguments: str) -> str:
    """The command line without paths on this machine."""
    peers = () if options.peers == "all" else ("--peers", options.peers)
    return " ".join(("python -m", module, *arguments, "--rounds", str(options.rounds), *peers))


def record(directory: Path, benchmark: str, size: str, entry: Mapping[str, Any]) -> bool:
    """Write an entry to its results file, print whether it meets each goal, and return whether it meets all."""
    file = directory / f"{benchmark}.json"
    directory.mkdir(parents=True, exist_ok=True)
    entries = (json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}) | {size: entry}
    file.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {file}")
    concerned = {goal: value for goal, value in goals.reached({benchmark: entries}).items() if size in goal.sizes}
    for goal, value in concerned.items():
        bound = "no limit" if goal.must is None else f"must reach {goal.form.format(goal.must)}"
        bound += "" if goal.aim is None else f", aim: {goal.form.format(goal.aim)}"
        print(f"{'ok    ' if goal.met(value) else 'MISSED'} {goal.what}: {goal.form.format(value)} ({bound})")
    return all(goal.met(value) for goal, value in concerned.items())


def facts_alone(work: Path, command: str, kit_packages: tuple[str, ...]) -> dict[str, Any]:
    """`facts` of a benchmark without peers."""
    return facts(work, command, install("none", {}, _SCRATCH, kit_packages))


def facts(work: Path, command: str, installed: Installed) -> dict[str, Any]:
    """The part of an entry that describes where and how it was measured."""
    return {"command": command, "machine": machine.facts(work), "versions": installed.versions}
