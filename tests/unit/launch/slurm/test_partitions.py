"""A training job asks for a partition whose nodes all have its type. sinfo is a stand-in that prints as Slurm does."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.slurm import launcher
from hyperpod_ft.launch.slurm.launcher import SlurmLauncher
from hyperpod_ft.launch.slurm.site import SlurmNode, check_partition
from hyperpod_ft.runs.run import Run

# HyperPod's default partition has all nodes; a trn1 has 64 cores, an m5.4xlarge 8.
HYPERPOD_CLUSTER = "dev|64|node1 dev|8|node2 trn1|64|node1 m5|8|node2"


def nodes(listing: str) -> list[SlurmNode]:
    rows = [row.split("|") for row in listing.split()]
    return [SlurmNode(name, partition, "idle", int(cpus), 1000, name, "") for partition, cpus, name in rows]


def test_a_partition_with_nodes_of_several_sizes_is_refused() -> None:
    with pytest.raises(UserError) as refusal:
        check_partition(nodes(HYPERPOD_CLUSTER), "dev", "trn1.32xlarge")
    assert "cluster.partition: dev has nodes with 8, 64 CPUs" in refusal.value.problem
    assert refusal.value.remedy.endswith("m5, trn1")


def test_the_partition_of_all_nodes_is_refused_although_types_have_equal_cpus() -> None:
    with pytest.raises(UserError) as refusal:
        check_partition(nodes(HYPERPOD_CLUSTER.replace("|8|", "|64|")), "dev", "trn1.32xlarge")
    assert "cluster.partition: dev" in refusal.value.problem
    assert refusal.value.remedy.endswith("m5, trn1")


@pytest.mark.parametrize(
    ("listing", "partition"),
    [
        (HYPERPOD_CLUSTER, "trn1"),
        (HYPERPOD_CLUSTER, "a-partition-that-sbatch-will-refuse"),
        ("dev|64|node1 trn1|64|node1", "dev"),
        ("dev|64|node1 dev|64|node2 trn1|64|node1 trn1|64|node2 debug|64|node2", "dev"),
        ("all|64|node1 all|64|node2 debug|64|node2", "all"),  # not HyperPod's
        ("dev|64|node1 dev|8|node2", "dev"),  # an older cluster: there is no other
        ("", ""),  # Slurm has no nodes; sbatch says so
    ],
)
def test_what_is_left_to_slurm(listing: str, partition: str) -> None:
    check_partition(nodes(listing), partition, "trn1.32xlarge")


def test_it_is_refused_before_any_job_is_submitted(
    make_run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = "".join(f"{it.name}|{it.partition}|idle|{it.cpus}|1|{it.name}|none\\n" for it in nodes(HYPERPOD_CLUSTER))
    sinfo = f"case $* in *%P*) echo 'dev* trn1 m5' ;; *) printf '{listing}' ;; esac"
    for name, script in (("sinfo", sinfo), ("sbatch", "echo 1"), ("squeue", "exit 0")):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/bash\n{script}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(launcher, "HYPERPOD", tmp_path)
    trainium = {"engine": "neuron", "cluster__instance_type": "trn1.32xlarge", "parallelism": {"tensor_parallel": 8}}
    run = make_run(**trainium)
    run.freeze()
    with pytest.raises(UserError, match=r"not a trn1\.32xlarge"):
        SlurmLauncher().submit(run, run.plan.stages, {})
    assert run.journal.jobs() == []
    local = make_run()
    local.freeze()
    SlurmLauncher().submit(local, local.plan.stages[:1], {})
    assert len(local.journal.jobs()) == 1, "without accelerators, any node will do"
