"""Run files for tests: small, valid, and all below a temporary directory."""

import itertools
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hyperpod_ft import gc_pause
from hyperpod_ft.config import run_file
from hyperpod_ft.errors import UserError
from hyperpod_ft.localcluster import LocalCluster
from hyperpod_ft.localcluster.programs import find_programs
from hyperpod_ft.runs.job_files import NOTICE
from hyperpod_ft.runs.run import Run

# Two threads of torch or numpy in each of several workers on few cores mostly wait for each other, and spin meanwhile.
# Both read this when they are imported, which nothing above does; the scripts of stages set their own.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Some tests compare the bits of a model that was merged in a container with those of one that was merged here. A kernel
# that a shell has chosen for numpy would be used here only.
for name in [name for name in os.environ if name.startswith("OPENBLAS_")]:
    del os.environ[name]

# A shell without job control starts background commands with SIGINT ignored, and so does nohup. Every program started
# from here would inherit that, and tests send SIGINT: https://docs.python.org/3/library/signal.html#signal.SIGINT
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

MakeRun = Callable[..., Run]  # the fixture make_run

gc_pause.pause_collection()  # until all tests are imported


# Long files whose names would put them last: they would keep one of several workers busy when the others are done.
_FIRST = ("tests/unit/stages/", "tests/unit/test_benchmarks.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(_FIRST))


def pytest_collection_finish() -> None:
    gc_pause.resume_collection()


_NUMBERS = itertools.count()  # pytest would look for the next one among the directories of all tests


@pytest.fixture(autouse=True)
def _no_state_outside(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing a test does may write to the user's own state, or see the user's own cluster and token."""
    monkeypatch.setenv("XDG_STATE_HOME", f"{tmp_path_factory.getbasetemp()}/states/{next(_NUMBERS)}")
    for name in ("HYPERPOD_FT_LOCAL", "SLURM_CONF", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _notices_arrive() -> Iterator[None]:
    """Undo what training leaves: it ignores further notices, and the programs of later tests would inherit that."""
    yield
    signal.signal(NOTICE, signal.SIG_DFL)


@pytest.fixture(autouse=True, scope="session")
def _no_other_machine() -> Iterator[None]:
    """Fail a test that asks another machine, such as the instance metadata service, and keep its programs from that."""
    connect = socket.socket.connect

    def connect_here(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and not _is_of_this_machine(self.family, address[0]):
            pytest.fail(f"a test asks {address}, another machine")
        connect(self, address)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(socket.socket, "connect", connect_here)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        yield


def _is_of_this_machine(family: int, host: str) -> bool:
    """Whether an interface of this machine has the address."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((host, 0))
        except socket.gaierror:
            return True  # no address at all
        except OSError:
            return False
    return True


def run_file_values(root: Path, **overrides: Any) -> dict[str, Any]:
    """A complete run file with Hub sources, so that nothing has to exist; `overrides` as `section__key=value`."""
    values: dict[str, Any] = {
        "name": "test",
        "engine": "torch",
        "cluster": {"root": str(root), "instance_type": "local"},
        "env": {"python": "current"},
        "model": {"source": "org/model", "revision": "0123abc"},
        "dataset": {"source": "org/data", "revision": "4567def", "format": "dolly"},
        "parallelism": {"ranks_per_node": 2, "tensor_parallel": 2},
    }
    for key, value in overrides.items():
        section, _, name = key.partition("__")
        if name:
            values.setdefault(section, {})[name] = value
        else:
            values[section] = value
    return values


@pytest.fixture(scope="session")
def slurm_installed() -> None:
    """Skip without Slurm, except where it must be there."""
    try:
        find_programs()
    except UserError as error:
        if os.environ.get("CI") or os.environ.get("HYPERPOD_FT_REQUIRE_SLURM") == "1":
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def cluster(slurm_installed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """The local cluster of this test process: two nodes of four CPUs, gone when the process is, even by SIGKILL.

    Shared by the tests of a worker: leave its nodes idle. Pass `cluster.environment()` to what you start.
    """
    cluster = LocalCluster(tmp_path_factory.mktemp("cluster"))
    cluster.up(nodes=2, cpus=4, bound_to=os.getpid())
    yield cluster
    cluster.down()


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    def make(**overrides: Any) -> Run:
        values = run_file_values(tmp_path / "root", **overrides)
        return Run.of(run_file.resolve(run_file.validate(values, "run.yaml"), tmp_path))

    return make
