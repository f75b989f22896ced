"""Trainings that wait while a test holds them: none ends before the test has done what it came for, however late."""

import shlex
import sys
from pathlib import Path

from hyperpod_ft.job.watch import LIMIT
from tests.programs import write_program

# An audit hook: https://docs.python.org/3/library/audit_events.html
_AT_START = '''
import os, select, signal, sys
from pathlib import Path

HOLDS = Path(__file__).with_name("holds")

def wait_before_a_row(event, arguments):
    """Until the test lets the training go on, or a signal has come that it handles."""
    if event != "open" or arguments[1] != "a" or not str(arguments[0]).endswith("/metrics.jsonl"):
        return
    metrics = Path(arguments[0])
    rows = metrics.read_text().count("\\n")
    holds = HOLDS / metrics.parents[1].name
    came = None
    while any(rows >= int(hold.name) for hold in holds.glob("*")):
        if came is None:
            came, note = os.pipe()
            os.set_blocking(note, False)
            signal.set_wakeup_fd(note)
        if select.select([came], [], [], 0.05)[0]:
            break

sys.addaudithook(wait_before_a_row)
'''


def write_interpreter(path: Path, lines: str = "") -> None:
    """This interpreter, for a run's `env.python`; `lines` of bash come before it."""
    at_start = path.parent / "at-start"
    at_start.mkdir(parents=True)
    (at_start / "sitecustomize.py").write_text(_AT_START)
    # what is held is not taken for what hangs
    exported = f"export {LIMIT}=600 PYTHONPATH={shlex.quote(str(at_start))}${{PYTHONPATH:+:$PYTHONPATH}}\n"
    write_program(path, f'{lines}{exported}exec {shlex.quote(sys.executable)} "$@"')


def hold(interpreter: Path, name: str, rows: int) -> None:
    """Have the runs of this name wait once their metrics have so many rows, until `release`."""
    file = _hold(interpreter, name, rows)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()


def release(interpreter: Path, name: str, rows: int) -> None:
    _hold(interpreter, name, rows).unlink()


def _hold(interpreter: Path, name: str, rows: int) -> Path:
    return interpreter.with_name("at-start") / "holds" / name / str(rows)
