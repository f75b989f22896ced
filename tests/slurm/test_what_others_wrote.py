"""A run directory that somebody else wrote is read by every command, and nothing in it is used as configuration."""

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.localcluster.runtime import Runtime
from hyperpod_ft.runs.run import Run
from hyperpod_ft.serving.view import Pages
from tests.slurm.head import Head
from tests.waiting import wait_for

pytestmark = pytest.mark.slurm


@pytest.fixture
def planted() -> Iterator[tuple[str, Callable[[], bool]]]:
    """A slurm.conf, and whether a program of Slurm's has used it: it may also name libraries, which they load."""
    with socket.create_server(("127.0.0.1", 0)) as controller:
        controller.setblocking(False)

        def was_used() -> bool:
            try:
                controller.accept()[0].close()
            except BlockingIOError:
                return False
            return True

        port = controller.getsockname()[1]
        node = "NodeName=node1\nPartitionName=all Nodes=node1"
        yield f"ClusterName=x\nSlurmctldHost=x(127.0.0.1)\nSlurmctldPort={port}\n{node}\n", was_used


@pytest.fixture
def open_cluster(tmp_path: Path) -> Iterator[Runtime]:
    """A local cluster of this user whose directory others can write to: they may have made it."""
    cluster = Runtime(tmp_path / "open")
    cluster.path.mkdir()
    cluster.path.chmod(0o777)
    yield cluster
    shutil.rmtree(cluster.path)


def test_a_slurm_conf_of_somebody_else_is_not_used(
    head: Head, make_run: Callable[..., Run], planted: tuple[str, Callable[[], bool]], open_cluster: Runtime
) -> None:
    text, was_used = planted
    conf = open_cluster.conf
    conf.write_text(text)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(["squeue"], env=os.environ | {"SLURM_CONF": str(conf)}, **quiet) as squeue:
        try:
            wait_for(was_used)
        finally:
            squeue.kill()
    while was_used():
        pass  # it may have tried again
    run = make_run()
    run.freeze()
    job = {"stage": "env", "job_id": "7", "launcher": "slurm", "submitted": "2026-01-01T00:00:00Z"}
    run.paths.jobs_path.write_text(json.dumps([{**job, "slurm_conf": str(conf), "local_cluster": open_cluster.name}]))
    directory = str(run.paths.directory)
    head("list", str(run.paths.root))
    head("cancel", directory)
    head("serve", "--stop", directory)
    head("status", directory)
    head("logs", directory, "env")
    pages = Pages(run.paths.root, Launchers)
    assert all(run.paths.full_name.encode() in page for page in (pages.all_runs(), pages.run(run.paths.full_name)))
    assert not was_used()


@pytest.mark.parametrize(
    "planted_job",
    [
        {"job_id": "../../../x"},
        {"job_id": "--user=root"},
        {"stage": "../x"},
        {"code": "../../x"},
        {"local_cluster": "/x"},
    ],
)
def test_a_job_that_is_a_path_or_an_option_is_refused(
    head: Head, make_run: Callable[..., Run], planted_job: dict[str, str]
) -> None:
    run = make_run()
    run.freeze()
    job = {"stage": "env", "job_id": "7", "launcher": "slurm", "submitted": "2026-01-01T00:00:00Z"}
    run.paths.jobs_path.write_text(json.dumps([job | planted_job]))
    for command in ("status", "cancel"):
        assert f"{run.paths.jobs_path}: is damaged" in head(command, str(run.paths.directory), status=2)
