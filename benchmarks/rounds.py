"""Runs contenders in interleaved rounds: each round runs all of them on cold inputs, starting with a different one.

So a busy machine or a slow disk does not always affect the same contender. Ratios are taken within a round.
"""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import CommandError, evict, measure


@dataclass(frozen=True)
class Contender:
    """A command, its outputs, and a function that inspects them. A peer may fail, others must not.

    `figures` returns what the command itself measured, in every round. `prepare` is called before each.
    """

    name: str
    command: Sequence[str]
    outputs: Callable[[], Sequence[Path]]
    inspect: Callable[[], dict[str, Any]]
    is_peer: bool = False
    figures: Callable[[], Mapping[str, float]] = dict
    prepare: Callable[[], object] = lambda: None


def run(
    contenders: Sequence[Contender], rounds: int, inputs: Path, environment: Mapping[str, str], log: Path
) -> tuple[dict[str, Any], dict[str, str]]:
    """The recorded measurements by contender, and why the others could not be measured.

    Outputs are inspected in the first round, and removed after each. Raises CommandError if a non-peer fails.
    """
    measured: dict[str, list[dict[str, float]]] = {contender.name: [] for contender in contenders}
    outputs: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    for number in range(rounds):
        first = number % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            if contender.name in failed:
                continue
            remove(contender.outputs())
            contender.prepare()
            os.sync()  # so that no contender pays for what others wrote or removed
            evict(inputs)
            try:
                measurement = measure(contender.command, environment, log, contender.outputs)
                if not number:
                    outputs[contender.name] = contender.inspect()
                figures = dict(contender.figures())
                measured[contender.name].append(asdict(measurement) | figures)
            except CommandError as error:
                if not contender.is_peer:
                    raise
                failed[contender.name] = str(error)
                print(f"round {number + 1}: {contender.name} failed: {error}", flush=True)
                continue
            finally:
                remove(contender.outputs())
            print(
                f"round {number + 1}: {contender.name:<16} {measurement.wall:8.2f} s  cpu {measurement.cpu:7.2f} s  "
                f"peak {measurement.peak / 1e6:7.0f} MB  written {measurement.written / 1e9:6.2f} GB",
                *(f" {name} {value:.5g}" for name, value in figures.items()),
                flush=True,
            )
    results = {
        name: {"output": outputs[name], "rounds": measurements}
        for name, measurements in measured.items()
        if name not in failed
    }
    return results, failed


def remove(paths: Sequence[Path]) -> None:
    """Delete files and trees that exist."""
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
