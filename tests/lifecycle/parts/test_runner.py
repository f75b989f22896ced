"""Steps are run in order, tried again, given up, and written to the journal."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from provision import runner
from provision.errors import NodeError, PassingError
from provision.journal import Journal
from provision.node import Node
from provision.step import Step

from tests.waiting import wait_for


class Marker(Step):
    """Is so when its file is there."""

    first_wait = 0.01

    def __init__(self, name: str, do: Callable[[Path], object] = Path.touch, needs: tuple[str, ...] = ()) -> None:
        self.name = name
        self.needs = needs
        self._do = do

    def missing(self, node: Node) -> Sequence[str]:
        return [] if node.path(self.name).exists() else [f"no {self.name}"]

    def do(self, node: Node) -> None:
        self._do(node.path(self.name))


def events(node: Node) -> list[tuple[str, str]]:
    lines = [json.loads(line) for line in node.path("steps.jsonl").read_text().splitlines()]
    assert all(set(line) == {"time", "step", "event", "seconds", "message"} for line in lines)
    return [(line["step"], line["event"]) for line in lines]


def test_what_passes_is_tried_again_and_what_does_not_is_not(node: Node) -> None:
    def third_time(path: Path) -> None:
        tries = path.with_name("tries")
        tries.write_text(tries.read_text() + "x" if tries.exists() else "x")
        if len(tries.read_text()) < 3:
            raise PassingError("not yet")
        path.touch()

    def never(path: Path) -> None:
        raise NodeError("no such thing", "buy one")

    assert runner.run([Marker("a", third_time)], node, dry_run=False)
    assert not runner.run([Marker("b", never)], node, dry_run=False)
    assert events(node) == [
        *[("a", "retry")] * 2,
        ("a", "changed"),
        ("", "finished"),
        ("b", "failed"),
        ("", "failed"),
    ]
    assert "no such thing; buy one" in node.path("steps.jsonl").read_text()


def test_done_is_not_believed(node: Node) -> None:
    assert not runner.run([Marker("a", lambda path: None)], node, dry_run=False)
    assert events(node)[-2] == ("a", "failed")
    assert "still missing: no a" in node.path("steps.jsonl").read_text()


def test_what_needs_a_failed_step_is_not_run_and_the_rest_is(node: Node) -> None:
    def broken(path: Path) -> None:
        raise KeyError("a bug")

    steps = [Marker("a", broken), Marker("b", needs=("a",)), Marker("c", needs=("b",)), Marker("d")]
    assert not runner.run(steps, node, dry_run=False)
    assert events(node) == [("a", "failed"), ("b", "not_run"), ("c", "not_run"), ("d", "changed"), ("", "failed")]


def test_the_failure_of_an_advisory_step_is_a_warning(node: Node) -> None:
    step = Marker("a", lambda path: None)
    step.attempts, step.advisory = 1, True
    assert runner.run([step, Marker("b", needs=("a",))], node, dry_run=False)
    assert events(node) == [("a", "warning"), ("b", "changed"), ("", "finished")]
    assert "still missing: no a" in node.path("steps.jsonl").read_text()


def test_a_deadline_ends_a_step_and_its_commands(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline is over when the command runs."""
    pid = node.path("pid")

    def hang(path: Path) -> None:
        with subprocess.Popen(["sleep", "3600"]) as process:
            pid.write_text(str(process.pid))

    def later() -> float:
        return time.monotonic() + (300 if pid.exists() and pid.read_text() else 0)

    step = Marker("a", hang)
    step.deadline = 300
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=later, sleep=time.sleep))
    started = time.monotonic()
    assert not runner.run([step], node, dry_run=False)
    assert time.monotonic() - started < 250
    assert "not done after 300 s" in node.path("steps.jsonl").read_text()
    process = Path(f"/proc/{pid.read_text()}")
    wait_for(lambda: not process.exists() or "Z" in (process / "stat").read_text())


def test_a_killed_process_of_a_step_is_tried_again(node: Node) -> None:
    def once(path: Path) -> None:
        path.touch()
        subprocess.run(["sh", "-c", "kill -9 $PPID"], check=False)

    assert runner.run([Marker("a", once)], node, dry_run=False)
    assert events(node) == [("a", "retry"), ("a", "already_so"), ("", "finished")]


def test_a_step_may_have_much_to_say(node: Node) -> None:
    """More than a pipe holds; the log gets the beginning."""

    class Talker(Marker):
        def missing(self, node: Node) -> Sequence[str]:
            return [f"no user {number}" for number in range(20000)] if super().missing(node) else []

    step = Talker("a")
    step.deadline = 10
    assert runner.run([step], node, dry_run=False)
    line = json.loads(node.path("steps.jsonl").read_text().splitlines()[0])
    assert (line["event"], line["message"][:20]) == ("changed", "no user 0; no user 1")
    assert len(line["message"]) < 10000


def test_a_full_disk_ends_no_run(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    full = Node(node.root, node.settings, Journal(Path("/dev/full")), node.scripts)
    assert runner.run([Marker("a")], full, dry_run=False)
    assert "provision: finished" in capsys.readouterr().out


def test_only_brings_what_is_needed() -> None:
    steps = [Marker("a"), Marker("b", needs=("a",)), Marker("c", needs=("b",)), Marker("d")]
    assert [step.name for step in runner.select(steps, ["c"])] == ["a", "b", "c"]
    assert [step.name for step in runner.select(steps, [])] == ["a", "b", "c", "d"]
    with pytest.raises(NodeError, match="no step 'e'; steps: a, b, c, d"):
        runner.select(steps, ["e"])


def test_two_runs_do_not_mix(node: Node) -> None:
    with (
        runner.locked(node),
        pytest.raises(NodeError, match="another run has held it"),
        runner.locked(node, seconds=0.1),
    ):
        pass
    with runner.locked(node, seconds=0.1):
        pass
