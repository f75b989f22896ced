"""`hyperpod-ft doctor` on the local cluster: all is well there, and each planted fault is a row that differs.

Slurm, its nodes and the volume are real. Faults that a local cluster cannot have are programs on PATH that print what
Slurm's or the machine's would.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hyperpod_ft.doctor import slurm
from hyperpod_ft.doctor.check import Expectations, run_checks
from hyperpod_ft.doctor.head_node import checks, every_node
from hyperpod_ft.findings import Finding
from hyperpod_ft.launch.slurm.site import SlurmSite
from hyperpod_ft.localcluster import LocalCluster
from hyperpod_ft.runs.run import Run
from tests.slurm.head import Head
from tests.slurm.local_clusters import run as slurm_client
from tests.unit.wheels import wheel
from tests.waiting import wait_for

pytestmark = pytest.mark.slurm
RowOf = Callable[..., Finding]
Rows = Callable[..., dict[str, Finding]]
NEURON_LS = 'echo \'[{"neuron_device": 0, "nc_count": 2}]\''


@pytest.fixture
def row_of(
    cluster: LocalCluster, make_run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> RowOf:
    """One row of a head node: `row_of(name, section__key=value...)`, for the run file with these settings."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PIP_NO_INDEX", "1")

    def run_one(name: str, site: SlurmSite | None = None, **settings: object) -> Finding:
        config = make_run(**settings).config
        expected = Expectations(config.root, config, site or SlurmSite(cluster.environment()))
        (row,) = run_checks([one for one in checks(expected) if one.name == name])
        return row

    return run_one


@pytest.fixture
def nodes_of(cluster: LocalCluster, make_run: Callable[..., Run]) -> Iterator[Rows]:
    """The rows of `--nodes` by name; of several with one name the first."""

    def rows(**settings: object) -> dict[str, Finding]:
        config = make_run(**settings).config
        found = every_node(Expectations(config.root, config, SlurmSite(cluster.environment())))
        return {row.name: row for row in reversed(found)}

    yield rows
    wait_for(lambda: not slurm_client(cluster, "squeue", "--noheader"))  # its job may still be completing


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str, str], None]:
    """Put a program on PATH before those of the machine; REAL is the machine's own."""

    def write(name: str, script: str) -> None:
        file = tmp_path / "bin" / name
        file.parent.mkdir(exist_ok=True)
        real = next((found for place in ("/usr/bin", "/usr/sbin") if (found := Path(place, name)).exists()), "")
        file.write_text(f"#!/bin/bash\n{script.replace('REAL', str(real))}\n")
        file.chmod(0o755)

    return write


def test_nothing_differs_on_the_local_cluster(head: Head) -> None:
    before = sorted(head.directory.rglob("*"))
    rows = json.loads(head("doctor", "quickstart", "--nodes", "--json", "--report", "report.txt"))
    assert {row["name"]: row["verdict"] for row in rows if row["name"] != "clock"} == dict.fromkeys(
        [
            *("kit", "virtual environment", "packages", "cluster.root", "volume", "locks", "rename and fsync"),
            *("free space", "certificates", "temporary files", "names", "Slurm", "partitions", "nodes", "jobs"),
            *("auto-resume", "topology", "accounting", "node node1", "node node2", "clocks of nodes", "health"),
        ],
        "ok",
    )
    report = (head.directory / "report.txt").read_text()
    assert all(row["found"] in report for row in rows)
    assert head.environment["HF_TOKEN"] not in report
    assert sorted(head.directory.rglob("*")) == sorted([*before, head.directory / "report.txt"]), "nothing is left"
    head.wait_for_the_queue()  # its job may still be completing


def test_without_a_run_file_all_partitions_are_looked_at(head: Head) -> None:
    shown = head("doctor")
    assert "dev: 2 nodes" in shown
    assert "sbatch accepts --requeue" in shown


@pytest.mark.parametrize(
    ("settings", "row", "found"),
    [
        ({"cluster__partition": "trn1"}, "partitions", "no partition trn1 with nodes; there are: dev"),
        ({"cluster__partition": "trn1"}, "jobs", "invalid partition"),
        ({"cluster__cpu_partition": "cpu"}, "partitions", "no partition cpu"),
        ({"cluster__nodes": 3}, "partitions", "partition dev has 2 nodes, and the run needs 3"),
        ({"cluster__nodes": 3}, "jobs", "sbatch refuses train"),
        ({"env__python": "/no/such/python"}, "virtual environment", "cannot run /no/such/python"),
    ],
)
def test_a_run_file_that_asks_for_what_is_not_there(
    row_of: RowOf, settings: dict[str, object], row: str, found: str
) -> None:
    shown = row_of(row, **settings)
    assert shown.verdict == "error"
    assert found.lower() in shown.found.lower()
    assert shown.remedy


def test_packages_that_no_index_has(row_of: RowOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", f"{tmp_path / 'wheels/torch'} {tmp_path / 'wheels/transformers'}")
    for version in ("2.13.0+cpu", "2.12.0"):
        wheel(tmp_path / "wheels", "torch", version, {})
    wheel(tmp_path / "wheels", "transformers", "5.20.2", {})
    assert row_of("packages", env__python=None).verdict == "ok"
    (tmp_path / "wheels/torch/torch-2.13.0+cpu-py3-none-any.whl").unlink()
    lost = row_of("packages", env__python=None)
    assert lost.verdict == "error"
    assert "torch 2.13.0" in lost.found
    assert "2.12.0" in lost.found


@pytest.mark.parametrize(
    ("name", "script", "row", "found"),
    [
        ("timedatectl", "echo no", "clock", "not synchronized"),
        ("scontrol", "REAL \"$@\" | sed 's/topology.none/topology\\/tree/'", "topology", "no switches"),
        ("scontrol", "REAL \"$@\" | sed 's/22[.]05[.][0-9]*/20.11.9/'", "Slurm", "20.11.9 is older"),
        ("scontrol", "REAL \"$@\" | sed 's/storage.none/storage\\/slurmdbd/'", "accounting", "sacct fails"),
        ("sinfo", "REAL \"$@\" | sed '/^node2/{s/|4|/|96|/;p;s/|dev|/|trn1|/}'", "partitions", "4, 96 CPUs"),
        ("hostname", "true", "auto-resume", "unrecognized option '--auto-resume"),  # Debian's srun refuses it
    ],
)
def test_a_fault_of_the_machine_or_of_slurm(
    row_of: RowOf,
    program: Callable[[str, str], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    script: str,
    row: str,
    found: str,
) -> None:
    monkeypatch.setattr(slurm, "HYPERPOD", tmp_path)
    program(name, script)
    shown = row_of(row)
    assert shown.verdict == "error", shown
    assert found in shown.found
    assert shown.remedy


def test_a_topology_that_refuses_jobs_is_repaired_on_the_controller(
    row_of: RowOf, program: Callable[[str, str], None]
) -> None:
    program("sbatch", "echo 'sbatch: error: Requested topology configuration is not available' >&2; exit 1")
    shown = row_of("jobs")
    assert (shown.verdict, "train" in shown.found) == ("error", True), shown
    assert "topology.conf" in shown.remedy


def test_accounting_that_does_not_know_the_user(row_of: RowOf, program: Callable[[str, str], None]) -> None:
    on = "s/storage.none/storage\\/slurmdbd/; s/\\(StorageEnforce *=\\).*/\\1 associations/"
    program("scontrol", f'REAL "$@" | sed "{on}"')
    program("sacct", "exit 0")
    program("sacctmgr", "exit 0")
    unknown_user = row_of("accounting")
    assert unknown_user.verdict == "error"
    assert "sacctmgr add user" in unknown_user.remedy
    program("sacctmgr", "echo users")
    assert row_of("accounting").verdict == "ok"


def test_srun_that_knows_hyperpods_option(
    row_of: RowOf, program: Callable[[str, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "HYPERPOD", tmp_path)
    program("srun", 'exec REAL "${@/--auto-resume=1/--quiet}"')
    assert row_of("auto-resume").verdict == "ok"


def test_no_controller(row_of: RowOf, cluster: LocalCluster, tmp_path: Path) -> None:
    conf = tmp_path / "slurm.conf"
    text = cluster.conf.read_text()
    port = next(line for line in text.splitlines() if line.startswith("SlurmctldPort="))
    conf.write_text(text.replace(port, "SlurmctldPort=9").replace("MessageTimeout=30", "MessageTimeout=1"))
    away = SlurmSite({"SLURM_CONF": str(conf)})
    slurm = row_of("Slurm", away)
    assert slurm.verdict == "error"
    assert "slurmctld is running" in slurm.remedy
    assert row_of("jobs", away).verdict == "warning"


def test_a_lost_node(row_of: RowOf, nodes_of: Rows, cluster: LocalCluster) -> None:
    cluster.kill_node("node2")
    try:
        lost = row_of("nodes")
        assert lost.verdict == "error"
        assert "node2 is down" in lost.found
        rows = nodes_of()
        assert rows["node node1"].verdict == "ok"
        assert rows["node node2"].verdict == "warning"
    finally:
        cluster.start_node("node2")


def test_nodes_that_lack_devices_and_have_an_old_driver(
    row_of: RowOf, nodes_of: Rows, program: Callable[[str, str], None]
) -> None:
    program("neuron-ls", NEURON_LS)
    program("modinfo", "echo 2.20.1.0")
    rows = nodes_of(engine="neuron", env__python=None, cluster__instance_type="trn1.32xlarge", parallelism={})
    assert rows["node node1"].verdict == "error"
    assert "2.20.1.0 is older than 2.24.7.0" in rows["node node1"].found
    assert rows["health"].found == "node1: neuron-ls lists 1 devices, trn1.32xlarge has 16"
    assert "scontrol update nodename=node1 state=drain" in rows["health"].remedy


def test_a_busy_node_does_not_hide_the_others(nodes_of: Rows, head: Head) -> None:
    head.slurm("sbatch", "--nodelist=node1", "--output=/dev/null", "--chdir=/", "--wrap=sleep 300")
    head.wait(lambda: "node1 mixed" in head.slurm("sinfo", "--Node", "--format=%N %T %C"))
    rows = nodes_of()
    assert rows["node node1"].verdict == "warning"
    assert "it is mixed" in rows["node node1"].found
    assert rows["node node2"].verdict == "ok"


def test_a_node_that_becomes_busy(nodes_of: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between sinfo and srun. These are the words of Slurm 22.05."""
    errors = "srun: error: Unable to allocate resources: Requested nodes are busy\n"
    monkeypatch.setattr(SlurmSite, "on_nodes", lambda *arguments: ("", errors))
    row = nodes_of()["node node2"]
    assert row.verdict == "warning"
    assert "Requested nodes are busy" in row.found


def test_nodes_that_cannot_run_the_kit(nodes_of: Rows, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "python-of-the-head-node-only"))
    row = nodes_of(env__python="/usr/bin/python3")["node node1"]
    assert row.verdict == "error"
    assert "python-of-the-head-node-only" in row.found
