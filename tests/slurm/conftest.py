"""The head node of a user, with the local cluster of this test process; and a cluster of a test's own."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hyperpod_ft.localcluster import LocalCluster
from tests.slurm.head import Head

TOKEN = "hf_veryverysecrettokenveryverysecret"


@pytest.fixture
def own(slurm_installed: None, tmp_path: Path) -> Iterator[LocalCluster]:
    """A cluster of the test's own, not yet up."""
    cluster = LocalCluster(tmp_path / "cluster")
    yield cluster
    cluster.down()


@pytest.fixture
def head(cluster: LocalCluster, tmp_path: Path) -> Iterator[Head]:
    head = Head(tmp_path, cluster.environment() | {"HF_TOKEN": TOKEN, "XDG_STATE_HOME": str(tmp_path / "state")})
    yield head
    head.slurm("scancel", "--user", str(os.getuid()))
    head.wait_for_the_queue()
