"""Ranks that torchrun forks end, and are signalled, as those that it starts."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from hyperpod_ft.job import words
from hyperpod_ft.localcluster.ports import reserve_ports
from hyperpod_ft.processes import children, descendants, is_running
from tests.training.conftest import ENVIRONMENT
from tests.waiting import wait_for

pytestmark = pytest.mark.training

TESTS = Path(__file__).parent
ALONE = ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--nproc-per-node=2")


@contextlib.contextmanager
def torchrun(
    directory: Path, mode: str, *preloaded: str, meeting: Sequence[str] = ALONE
) -> Iterator["subprocess.Popen[bytes]"]:
    """torchrun, as a rule with two ranks; when the block ends, none of its processes are left."""
    attempt = directory / "attempt"
    attempt.mkdir(parents=True)
    options = [*meeting, f"--log-dir={directory}/log"]
    options += [f"--preload={module}" for module in preloaded]
    # with a short path, and what a killed process leaves there goes with it
    temporary = tempfile.TemporaryDirectory(prefix="ranks-")
    paths = {"PYTHONPATH": f"{TESTS}:{TESTS.parents[1]}", "TMPDIR": temporary.name, "HYPERPOD_FT_ATTEMPT": str(attempt)}
    paths |= {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "node1"}
    with (directory / "output").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "hyperpod_ft.job.torchrun", *options, "-m", "forked_worker", str(directory), mode],
            env=os.environ | ENVIRONMENT | paths,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    started: set[int] = set()
    try:
        yield process
        started |= {process.pid, *descendants(process.pid)}
    finally:
        process.kill()
        process.wait()
        words.leave(process)
        for number in range(2):
            with suppress(OSError, ProcessLookupError):
                started.add(json.loads((directory / f"rank-{number}.json").read_bytes())["server"])
        wait_for(lambda: not any(map(is_running, started)), what="a process is left")
        temporary.cleanup()


def ranks(directory: Path, process: "subprocess.Popen[bytes]") -> list[dict[str, Any]]:
    """What the ranks found, once both have said it."""
    paths = [directory / f"rank-{number}.json" for number in range(2)]
    wait_for(lambda: all(path.exists() for path in paths), process=process)
    return [json.loads(path.read_bytes()) for path in paths]


def failure(directory: Path) -> dict[str, Any]:
    [path] = (directory / "attempt").glob("failure-*.json")
    found: dict[str, Any] = json.loads(path.read_bytes())
    return found


def test_the_server_of_both_engines_has_one_thread_and_no_device_and_ranks_get_the_notice(tmp_path: Path) -> None:
    engines = ["hyperpod_ft.engines.torch.loop", "hyperpod_ft.engines.trl.loop"]
    with torchrun(tmp_path, "notice", *engines) as process:
        for found in ranks(tmp_path, process):
            assert found["threads of the server"] == 1 and not found["cuda"]
            assert found["imported"] == ["peft", "torch", "transformers", "trl"] and found["variables"] == []
            directory = Path(found["error file"]).parent
            assert directory.name.startswith("pymp-") and not directory.stat().st_mode & 0o077
        os.kill(found["server"], signal.SIGTERM)  # as Slurm does when a job is cancelled
        everyone = descendants(process.pid)
        process.send_signal(signal.SIGUSR1)
        wait_for(lambda: all((tmp_path / f"noticed-{rank}").exists() for rank in range(2)), process=process)
        assert set(everyone) == set(descendants(process.pid)), "nothing else ended"
        process.kill()
        wait_for(lambda: not any(map(is_running, everyone)), what="ranks outlive torchrun")


def test_the_status_is_that_of_the_rank_that_failed_and_not_of_its_echo(tmp_path: Path) -> None:
    """It is reported while another rank still runs; both are started again when torchrun is told to."""
    with torchrun(tmp_path, "statuses", "torch") as process:
        reports = tmp_path / "attempt"
        first = ranks(tmp_path, process)
        wait_for((reports / "failure-0-node1.json").exists, process=process)
        assert is_running(first[0]["pid"]), "which torchrun gives half a minute"
        words.say(process, words.END)
        wait_for(lambda: not is_running(first[0]["pid"]))
        for path in tmp_path.glob("rank-*.json"):  # both are to be there again
            path.unlink()
        words.say(process, words.begin(1))
        wait_for((reports / "failure-1-node1.json").exists, process=process)
        assert {found["server"] for found in [*first, *ranks(tmp_path, process)]} == {first[0]["server"]}
        words.leave(process)
        assert process.wait(300) == 7
    output = (tmp_path / "output").read_text()
    assert output.count("torchrun: rank 1 ended first, with exit status 7") == 2
    assert "Traceback" not in output
    for report in reports.iterdir():
        found = json.loads(report.read_bytes())
        assert (found["rank"], found["status"]) == (1, 7)


def test_ranks_are_ended_for_those_of_another_node(tmp_path: Path) -> None:
    with torchrun(tmp_path, "waits", "torch") as process:
        server = ranks(tmp_path, process)[0]["server"]
        before = children(server)
        words.say(process, words.END)
        wait_for(lambda: not any(map(is_running, before)), process=process)
        time.sleep(0.1)
        words.say(process, words.begin(1))
        wait_for(lambda: len(children(server)) == 2, process=process)
        words.leave(process)
        time.sleep(0.1)
        assert len(children(server)) == 2, "only those end that have failed"
        process.terminate()
        assert process.wait(300) == 143
    assert not list((tmp_path / "attempt").iterdir())


def test_ranks_end_with_their_server_which_is_a_crash(tmp_path: Path) -> None:
    with torchrun(tmp_path / "killed", "waits", "torch") as process:
        server = ranks(tmp_path / "killed", process)[0]["server"]
        forks = children(server)
        os.kill(server, signal.SIGKILL)
        words.leave(process)
        assert process.wait(300) == 255
        wait_for(lambda: not any(map(is_running, forks)), what="ranks outlive their server")
    assert failure(tmp_path / "killed")["status"] == 255
    # and the end that they are made for
    with torchrun(tmp_path / "done", "done", "torch") as process:
        assert process.wait(300) == 0
    assert not list((tmp_path / "done" / "attempt").iterdir())


def test_a_node_whose_ranks_are_done_begins_again_with_the_others(tmp_path: Path) -> None:
    ports = reserve_ports(1)
    meeting = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={ports.first}"]
    with ports.lock, contextlib.ExitStack() as nodes:
        both = [
            nodes.enter_context(
                torchrun(tmp_path / str(node), "rank 0 fails once", "torch", meeting=[*meeting, f"--node-rank={node}"])
            )
            for node in range(2)
        ]
        wait_for((tmp_path / "0" / "attempt" / "failure-0-node1.json").exists, process=both[0])
        for word in (words.END, words.begin(1)):
            for node in both:
                words.say(node, word)
        wait_for(lambda: "again" in (tmp_path / "0" / "output").read_text(), process=both[0])
        for node in both:
            words.leave(node)
        assert [node.wait(300) for node in both] == [0, 0]
    assert failure(tmp_path / "0")["status"] == 7 and not list((tmp_path / "1" / "attempt").iterdir())
