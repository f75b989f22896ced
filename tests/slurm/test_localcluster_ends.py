"""A local cluster leaves nothing behind, however it, its nodes or its starter end."""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from hyperpod_ft.localcluster import LocalCluster
from hyperpod_ft.processes import descendants
from tests.slurm.local_clusters import (
    assert_gone,
    command_line,
    is_unlocked,
    processes_of,
    run,
    start_python,
    submit_escaping_job,
)
from tests.waiting import wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


def test_killed_node_loses_every_process_and_no_other_does(own: LocalCluster) -> None:
    own.up()
    escapee = submit_escaping_job(own, own.directory)  # the batch script runs on node1
    own.kill_node("node2")
    assert escapee.is_alive()
    own.kill_node("node1")
    assert not escapee.is_alive()
    assert not any(" sleep" in process or "slurmd" in process for process in processes_of(own))
    own.start_node("node1")
    own.start_node("node2")
    assert run(own, "srun", "-N2", "echo", "back") == "back\nback\n"


def test_down_kills_job_processes_that_escaped(own: LocalCluster) -> None:
    own.up()
    escapee = submit_escaping_job(own, own.directory)
    assert own.down()
    assert not escapee.is_alive()
    assert_gone(own)


def test_daemon_watch_killed_leaves_nothing(own: LocalCluster) -> None:
    own.up()
    escapee = submit_escaping_job(own, own.directory)
    os.kill(own.status().pid or 0, signal.SIGKILL)
    wait_for(lambda: processes_of(own) == [], seconds=300)
    assert not escapee.is_alive()
    assert not own.status().running
    assert own.up()
    assert run(own, "squeue", "-h") == ""


def test_guard_killed_leaves_nothing_on_its_node(own: LocalCluster) -> None:
    own.up()
    escapee = submit_escaping_job(own, own.directory)
    processes = descendants(own.status().pid or 0)
    slurmd = next(pid for pid in processes if command_line(pid).endswith("/slurmd\0-D\0-N\0node1\0"))
    guard = int(Path(f"/proc/{slurmd}/stat").read_text().split()[3])
    os.kill(guard, signal.SIGKILL)
    wait_for(lambda: not escapee.is_alive(), seconds=300)
    wait_for(lambda: not Path(f"/proc/{slurmd}").exists())
    own.start_node("node1")
    assert run(own, "srun", "-w", "node1", "echo", "back") == "back\n"


def test_everything_of_ours_killed_at_once_is_cleaned_by_the_next_up(own: LocalCluster) -> None:
    own.up()
    escapee = submit_escaping_job(own, own.directory)
    watch = own.status().pid or 0
    ours = [pid for pid in descendants(watch) if "localcluster" in command_line(pid)]
    assert len(ours) == 4  # munged, slurmctld, node1, node2
    for pid in (watch, *ours):
        os.kill(pid, signal.SIGSTOP)
    for pid in (watch, *ours):
        os.kill(pid, signal.SIGKILL)
    assert escapee.is_alive()
    assert own.up()
    wait_for(lambda: not escapee.is_alive())  # `up` kills strays, and does not wait for their end
    wait_for(lambda: not any(" sleep" in process for process in processes_of(own)))


def test_controller_death_ends_the_cluster(own: LocalCluster) -> None:
    own.up(nodes=1)
    pid = int((own.conf.parent / "slurmctld.pid").read_text())
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: processes_of(own) == [], seconds=300)
    assert "slurmctld ended" in (own.logs / "daemons.log").read_text()


def test_runtime_directory_removed_ends_the_cluster(own: LocalCluster) -> None:
    own.up(nodes=1)
    shutil.rmtree(own.conf.parent, ignore_errors=True)
    wait_for(lambda: processes_of(own) == [], seconds=300)


def test_bound_cluster_ends_with_its_killed_starter(own: LocalCluster) -> None:
    code = """if True:
        import os, sys, time
        from pathlib import Path
        from hyperpod_ft.localcluster import LocalCluster
        LocalCluster(Path(sys.argv[1])).up(bound_to=os.getpid())
        time.sleep(300)"""
    starter = start_python(code, own.directory)
    wait_for(lambda: (own.status().running and own.status().nodes[1].state == "idle") or starter.poll())
    escapee = submit_escaping_job(own, own.directory)
    starter.kill()
    starter.wait()
    wait_for(lambda: processes_of(own) == [], seconds=300)
    assert not escapee.is_alive()
    assert_gone(own)


def test_unbound_cluster_outlives_its_starter(own: LocalCluster) -> None:
    code = "import sys, pathlib, hyperpod_ft.localcluster as l; l.LocalCluster(pathlib.Path(sys.argv[1])).up(nodes=1)"
    assert start_python(code, own.directory).wait() == 0
    time.sleep(0.5)
    assert own.status().nodes == (("node1", "idle"),)


@pytest.mark.parametrize(
    ("with_signal", "moment"),
    [
        (signal.SIGINT, "slurmctld.log"),
        *[(signal.SIGKILL, moment) for moment in ("daemons.log", "munged.out", "slurmctld.log")],
    ],
)
def test_starter_stopped_during_up_leaves_nothing(own: LocalCluster, with_signal: signal.Signals, moment: str) -> None:
    code = """if True:
        import sys
        from pathlib import Path
        from hyperpod_ft.localcluster import LocalCluster
        LocalCluster._node_states = lambda *_: {}  # no node is ever idle: `up` does not end before the signal
        LocalCluster(Path(sys.argv[1])).up(nodes=1)"""
    starter = start_python(code, own.directory)
    wait_for((own.logs / moment).exists, seconds=300)
    starter.send_signal(with_signal)
    assert starter.wait() != 0
    wait_for(lambda: is_unlocked(own), seconds=300)
    assert processes_of(own) == []
    assert own.down() is False
    assert_gone(own)
