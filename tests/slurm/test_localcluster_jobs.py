"""Jobs on a local cluster run in order, are requeued or fail with a node, and outlive daemons."""

import os
from pathlib import Path

import pytest

from hyperpod_ft.errors import UserError
from hyperpod_ft.localcluster import LocalCluster
from tests.slurm.local_clusters import job_state, processes_of, run
from tests.waiting import wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


def test_node_loss_requeues_the_job_or_fails_it(cluster: LocalCluster, tmp_path: Path) -> None:
    def sbatch(option: str, out: str) -> str:
        script = 'echo attempt ${SLURM_RESTART_COUNT:-0}; [ -n "$SLURM_RESTART_COUNT" ] || srun sleep 300'
        arguments = ("--parsable", "-N2", "-o", out, "--open-mode=append", option, "--wrap", script)
        return run(cluster, "sbatch", *arguments, cwd=tmp_path).strip()

    again, lost = sbatch("--requeue", "again"), sbatch("--no-requeue", "lost")
    wait_for(lambda: sum(" sleep" in process for process in processes_of(cluster)) == 4)
    cluster.kill_node("node2")
    try:
        assert ("node2", "down") in [(name, state.rstrip("*")) for name, state in cluster.status().nodes]
        wait_for(lambda: job_state(cluster, lost) == "NODE_FAIL")
        wait_for(lambda: job_state(cluster, again) == "PENDING")
    finally:
        cluster.start_node("node2")
    wait_for(lambda: job_state(cluster, again) == "COMPLETED")
    assert (tmp_path / "again").read_text().split("\n")[-2] == "attempt 1"
    wait_for(lambda: [state for _, state in cluster.status().nodes] == ["idle", "idle"])
    with pytest.raises(UserError, match=r"no node 'node3' in this local cluster; .*node1, node2"):
        cluster.kill_node("node3")


def test_jobs_outlive_daemons_that_are_killed(cluster: LocalCluster, tmp_path: Path) -> None:
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    script = f"touch {begun}; while [ ! -e {ended} ]; do sleep 0.1; done; echo done"
    job = run(cluster, "sbatch", "--parsable", "-o", "out", "--wrap", script, cwd=tmp_path).strip()
    wait_for(begun.exists)  # Slurm says RUNNING before a node knows of the job
    node = run(cluster, "squeue", "-h", "-o", "%N", "-j", job).strip()
    slurmds = {process for process in processes_of(cluster) if process.endswith(" slurmd")}
    cluster.restart_slurmd(node)
    wait_for(lambda: len(slurmds - set(processes_of(cluster))) == 1)
    ended.touch()
    wait_for(lambda: job_state(cluster, job) == "COMPLETED")
    assert (tmp_path / "out").read_text() == "done\n"

    cluster.kill_controller()
    assert not any(process.endswith(" slurmctld") for process in processes_of(cluster))
    cluster.start_controller()
    # Slurm saves its state every few seconds: it may have forgotten that the job has run, or that there was one
    again = run(cluster, "sbatch", "--parsable", "-o", "again", "--wrap", "echo done", cwd=tmp_path).strip()
    wait_for(lambda: job_state(cluster, again) == "COMPLETED")
    assert (tmp_path / "again").read_text() == "done\n"
    # a controller that forgot the job's end waits minutes for it
    run(cluster, "scancel", "--quiet", "--user", str(os.getuid()))
    wait_for(lambda: not run(cluster, "squeue", "--noheader"))
