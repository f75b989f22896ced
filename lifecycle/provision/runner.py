"""Carries out steps in order: a process for each attempt, killed at the step's deadline with the commands it started.

A separate process, because code that hangs on a dead network file system cannot be interrupted from within.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Iterator, Sequence

from provision.errors import NodeError
from provision.journal import Journal
from provision.node import Node
from provision.step import Outcome, Step, attempt

LOCK = "/var/lib/provision/lock"
_LOCK_SECONDS = 900.0
# A killed process that waits in the kernel for its file system does not end, so the wait for it is limited.
_KILL_SECONDS = 5.0
_MESSAGE_CHARACTERS = 4000


def select(steps: Sequence[Step], only: Sequence[str]) -> list[Step]:
    """All steps, or those named in `only` and what they need, in order. Raises NodeError for an unknown name."""
    known = {step.name: step for step in steps}
    unknown = [name for name in only if name not in known]
    if unknown:
        raise NodeError(f"no step {unknown[0]!r}", f"steps: {', '.join(known)}")
    chosen: set[str] = set()
    waiting = list(only or known)
    while waiting:
        name = waiting.pop()
        if name not in chosen:
            chosen.add(name)
            waiting.extend(known[name].needs)
    return [step for step in steps if step.name in chosen]


def run(steps: Sequence[Step], node: Node, dry_run: bool) -> bool:
    """Run the steps; returns whether all succeeded. A step whose needs failed is not run; the others are."""
    bad: dict[str, str] = {}
    for step in steps:
        step_node = replace(node, journal=Journal(node.journal.file, step.name))
        broken = [need for need in step.needs if need in bad]
        if broken:
            bad[step.name] = "not_run"
            step_node.journal.write("not_run", f"needs {', '.join(broken)}")
            continue
        started = time.monotonic()
        outcome = _attempts(step, step_node, dry_run)
        if outcome.failed and step.advisory:
            outcome = Outcome("warning", outcome.message)
        step_node.journal.write(outcome.event, outcome.message, time.monotonic() - started)
        if outcome.failed:
            bad[step.name] = outcome.event
    if bad:
        what = ", ".join(f"{name} {how}".replace("_", " ") for name, how in bad.items())
        node.journal.write("failed", f"{what}; fix their errors above, then run provision.sh again")
    else:
        node.journal.write("finished")
    return not bad


@contextmanager
def locked(node: Node, seconds: float = _LOCK_SECONDS) -> Iterator[None]:
    """Serialize runs on one node. Steps inherit the lock, so leftover processes of a killed run are waited for."""
    path = node.path(LOCK)
    path.parent.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + seconds
    with path.open("a") as stream:
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise NodeError(f"{path}: another run has held it for {seconds:.0f} s", "end it") from None
                time.sleep(0.2)
        yield


def _attempts(step: Step, node: Node, dry_run: bool) -> Outcome:
    end = time.monotonic() + step.deadline
    wait = step.first_wait
    for number in range(1, step.attempts + 1):
        outcome = _attempt_in_child(step, node, dry_run, end)
        if not outcome.failed or not outcome.again or dry_run:
            return outcome
        if number == step.attempts or time.monotonic() + wait >= end:
            return outcome
        node.journal.write("retry", f"in {wait:.0f} s, attempt {number} of {step.attempts}: {outcome.message}")
        time.sleep(wait)
        wait *= 2
    return outcome


def _attempt_in_child(step: Step, node: Node, dry_run: bool, end: float) -> Outcome:
    reading, writing = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        # The child must not leave this branch: the cleanups above are the parent's.
        try:
            os.setpgid(0, 0)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            outcome = attempt(step, node, dry_run)
            # Must fit into the pipe's buffer: the parent reads only after this process has ended.
            outcome = replace(outcome, message=outcome.message[:_MESSAGE_CHARACTERS])
            os.write(writing, json.dumps(asdict(outcome)).encode())
            sys.stdout.flush()
        finally:
            os._exit(0)
    os.close(writing)
    ended = False
    try:
        ended = _wait(child, end)
        os.set_blocking(reading, False)
        said = os.read(reading, 65536) if ended else b""
    finally:
        os.close(reading)
        if not ended:
            _kill_group(child)
            _wait(child, time.monotonic() + _KILL_SECONDS)
    if not ended:
        return Outcome("failed", f"not done after {step.deadline:g} s")
    try:
        return Outcome(**json.loads(said))
    except ValueError:
        return Outcome("failed", "its process was killed", again=True)


def _wait(child: int, end: float) -> bool:
    """Whether the child ended by `end`, a time of the monotonic clock."""
    pause = 0.001
    while os.waitpid(child, os.WNOHANG)[0] != child:
        if time.monotonic() >= end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
    return True


def _kill_group(child: int) -> None:
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        # It does not have its own process group yet.
        os.kill(child, signal.SIGKILL)
