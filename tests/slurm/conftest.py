"""The local cluster of this test process: two nodes of four CPUs, gone when the process is, even by SIGKILL."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hyperpod_ft.localcluster import LocalCluster
from tests.slurm.head import Head

TOKEN = "hf_veryverysecrettokenveryverysecret"


@pytest.fixture(scope="session")
def cluster(slurm_installed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Shared by the tests of a worker: leave its nodes idle. Pass `cluster.environment()` to what you start."""
    cluster = LocalCluster(tmp_path_factory.mktemp("cluster"))
    cluster.up(nodes=2, cpus=4, bound_to_parent=True)
    yield cluster
    cluster.down()


@pytest.fixture
def head(cluster: LocalCluster, tmp_path: Path) -> Iterator[Head]:
    head = Head(tmp_path, cluster.environment() | {"HF_TOKEN": TOKEN, "XDG_STATE_HOME": str(tmp_path / "state")})
    yield head
    head.slurm("scancel", "--user", str(os.getuid()))
    head.wait_for_the_queue()
