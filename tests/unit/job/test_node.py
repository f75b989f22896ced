"""What each node of a training job runs. `scontrol` is a stand-in that answers as Slurm's manual shows."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from provision.steps import limits

from hyperpod_ft.errors import UserError
from hyperpod_ft.job.job_host import MASTER_PORTS, JobHost, this_host
from hyperpod_ft.job.node import main, master_port, rendezvous, torchrun_command
from hyperpod_ft.localcluster import ports as local_cluster
from hyperpod_ft.runs.job_files import ATTEMPT_NUMBER, FIRST_ADDRESS, NODE_NAMES, PYTHON
from hyperpod_ft.runs.run import Run
from tests.conftest import MakeRun

REPOSITORY = Path(__file__).resolve().parents[3]
SCONTROL = """#!/bin/bash
case "$*" in
  "show -o job 7") echo "JobId=7 JobName=a ReqNodeList=(null) ExcNodeList=(null) NodeList=node[3-4] BatchHost=node1" ;;
  "show hostnames node[3-4]") printf "node3\\nnode4\\n" ;;
  "show -o node node3") echo "NodeName=node3 Arch=x86_64 NodeAddr=10.1.2.3 NodeHostName=ip-10-1-2-3" ;;
  *) echo "scontrol: error: unexpected: $*" >&2; exit 1 ;;
esac
"""


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(SCONTROL)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return program


def test_the_nodes_of_a_step_meet_at_the_first_one(make_run: MakeRun, scontrol: Path) -> None:
    run = make_run(cluster__nodes=2)
    options = rendezvous(run, this_host({"SLURM_JOB_ID": "7"}))
    assert options[:3] == ["--nnodes=2", "--nproc-per-node=2", "--master-addr=10.1.2.3"]
    assert rendezvous(run, this_host({})) == [
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",
        "--nproc-per-node=4",
    ]


@pytest.mark.usefixtures("scontrol")
def test_slurm_is_asked_again_for_each_attempt_in_a_container() -> None:
    """A replaced node has another address; nodes in containers take what they are given."""
    earlier = {FIRST_ADDRESS: "10.9.9.9", NODE_NAMES: "node1 node2"}
    host = this_host({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[3-4]", **earlier})
    assert host.meeting_place() == "10.9.9.9"
    assert host.answers() == {FIRST_ADDRESS: "10.1.2.3", NODE_NAMES: "node3 node4"}


def test_a_containers_ranks_have_its_interpreter(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run()
    assert torchrun_command(run, [], 0, precompile=False)[0] == str(run.paths.python)
    monkeypatch.setenv(PYTHON, "/of/the/container")
    assert torchrun_command(run, [], 0, precompile=False)[0] == "/of/the/container"


def test_each_attempt_has_a_port_of_its_own(make_run: MakeRun) -> None:
    """Otherwise a rank that an earlier attempt left behind takes the place of a new one."""
    run = make_run()
    ports = set()
    for restart in range(3):
        for step in range(5):
            variables = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restart), "SLURM_STEP_ID": str(step)}
            ports.add(master_port(run.paths, this_host(variables)))
    assert len(ports) == 15
    assert all(1024 < port < 32768 for port in ports), "below the ephemeral ports"
    assert ports <= set(MASTER_PORTS)


def test_the_ranks_of_jobs_and_the_daemons_of_a_local_cluster_use_other_ports() -> None:
    assert set(MASTER_PORTS).isdisjoint(local_cluster.PORTS)
    assert local_cluster.PORTS[-1] < 32768, "below the ephemeral ports"
    assert f"{MASTER_PORTS[0]}-{MASTER_PORTS[-1]}" in limits.PORTS.split(","), "reserved on nodes"


def node(run: Run, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "hyperpod_ft.job.node", run.paths.directory],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)} | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_an_unfit_node_starts_no_rank_and_a_fit_one_becomes_torchrun(make_run: MakeRun, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/bash\n[[ $2 == hyperpod_ft.job.health ]] && exit "$UNFIT"\nprintf "%s\\n" "$@"; exit 9\n')
    python.chmod(0o755)
    run = make_run(cluster__nodes=2, env__python=str(python))
    run.freeze()
    unfit, fit = node(run, UNFIT="2"), node(run, UNFIT="0")
    assert (unfit.returncode, unfit.stdout) == (2, "")
    assert fit.returncode == 9 and fit.stdout.startswith("-m\nhyperpod_ft.job.torchrun\n")


def test_a_controller_that_does_not_answer_is_not_a_users_error(make_run: MakeRun, scontrol: Path) -> None:
    run = make_run(env__python=sys.executable)
    run.freeze()
    done = node(run, SLURM_JOB_ID="8")
    assert done.returncode == 1 and done.stderr.startswith("error: ") and "scontrol show job 8" in done.stderr


def test_a_run_that_cannot_be_read_is_one_line(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    monkeypatch.setattr(sys, "argv", ["node", str(run.paths.directory)])
    for failure, said in (
        (UserError("plan.json: is damaged"), "plan.json: is damaged"),
        (
            PermissionError(errno.EACCES, "Permission denied", str(run.paths.directory)),
            f"{run.paths.directory}: Permission denied",
        ),
    ):
        monkeypatch.setattr(Run, "open", Mock(side_effect=failure))
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and said in line


def test_the_memory_of_an_earlier_job_goes_at_the_first_attempt(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(env__python=sys.executable)
    run.freeze()
    job, elsewhere = tmp_path / "job", tmp_path / "elsewhere"
    monkeypatch.setattr(JobHost, "memory", lambda *_: job / "node")
    monkeypatch.setattr(os, "execvp", Mock())
    monkeypatch.setattr(sys, "argv", ["node", str(run.paths.directory)])
    monkeypatch.setenv("PATH", os.environ["PATH"])
    for directory in (job, elsewhere):
        (directory / "node").mkdir(parents=True)
    with monkeypatch.context() as patch:
        patch.setenv(ATTEMPT_NUMBER, "1")
        main()
        assert (job / "node").exists()
    main()
    assert not (job / "node").exists()
    job.rmdir()
    job.symlink_to(elsewhere)
    main()
    assert (elsewhere / "node").exists(), "another user may have made the link"
