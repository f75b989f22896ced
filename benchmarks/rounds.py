"""Contenders in interleaved rounds: each round runs every one on cold inputs, and begins with another one.

So a busy moment of the machine, or a disk that slows down, does not fall on the same one every time; and a ratio is
taken within a round.
"""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import CommandError, Measurement, evict, measure


@dataclass(frozen=True)
class Contender:
    """A command, what it leaves behind, and what is worth knowing about that. A peer may fail, others must not."""

    name: str
    command: Sequence[str]
    outputs: Callable[[], Sequence[Path]]
    inspect: Callable[[], dict[str, Any]]
    is_peer: bool = False


def run(
    contenders: Sequence[Contender], rounds: int, inputs: Path, environment: Mapping[str, str], log: Path
) -> tuple[dict[str, Any], dict[str, str]]:
    """What each contender did, by name, as it is recorded, and why the others could not be measured.

    An output is inspected in the first round, and removed after each. Raises CommandError when one that must not fails.
    """
    measured: dict[str, list[Measurement]] = {contender.name: [] for contender in contenders}
    outputs: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    for number in range(rounds):
        first = number % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            if contender.name in failed:
                continue
            remove(contender.outputs())
            os.sync()  # so that nobody pays for what others wrote or removed
            evict(inputs)
            try:
                measurement = measure(contender.command, environment, log, contender.outputs)
                if not number:
                    outputs[contender.name] = contender.inspect()
            except CommandError as error:
                if not contender.is_peer:
                    raise
                failed[contender.name] = str(error)
                print(f"round {number + 1}: {contender.name} failed: {error}", flush=True)
                continue
            finally:
                remove(contender.outputs())
            measured[contender.name].append(measurement)
            print(
                f"round {number + 1}: {contender.name:<16} {measurement.wall:8.2f} s  cpu {measurement.cpu:7.2f} s  "
                f"peak {measurement.peak / 1e6:7.0f} MB  written {measurement.written / 1e9:6.2f} GB",
                flush=True,
            )
    results = {
        name: {"output": outputs[name], "rounds": [asdict(measurement) for measurement in measurements]}
        for name, measurements in measured.items()
        if name not in failed
    }
    return results, failed


def remove(paths: Sequence[Path]) -> None:
    """Delete files and trees; what is not there is fine."""
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
