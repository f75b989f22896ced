"""The script of stage train on a real Slurm: its launch on three nodes, and what the supervisor makes of its end.

The stage itself is replaced by a few lines where what is tested is the script: they lie in a copy of the kit's code.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest

from hyperpod_ft.job.watch import LIMIT
from hyperpod_ft.launch.render import Installation, render
from hyperpod_ft.launch.snapshot import snapshot
from hyperpod_ft.localcluster import LocalCluster
from hyperpod_ft.runs import attempts
from hyperpod_ft.runs.job_files import hangs
from hyperpod_ft.runs.records import Record, utc_now
from hyperpod_ft.runs.run import Run
from tests.conftest import MakeRun
from tests.slurm.local_clusters import run as slurm
from tests.waiting import wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.training, pytest.mark.timeout(1200)]

# Every rank says who it is, and what the sum over all ranks of 1 + rank is.
ALL_REDUCE = """
import json, os, sys
from pathlib import Path
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor(1.0 + dist.get_rank())
dist.all_reduce(total)
names = ("SLURMD_NODENAME", "GROUP_RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
facts = {name: os.environ[name] for name in names} | {"rank": dist.get_rank(), "total": total.item()}
Path(sys.argv[1], f"rank-{dist.get_rank()}.json").write_text(json.dumps(facts))
dist.destroy_process_group()
"""

# Trains one step at the notice of the time limit, for which it is ready then; done after that.
ONE_STEP_A_NOTICE = """
import signal, sys, time
from pathlib import Path
run = Path(sys.argv[1])
def save(number, frame):
    (run / "checkpoints" / "step-00000001").mkdir(parents=True)
    sys.exit(128 + number)
signal.signal(signal.SIGUSR1, save)
(run / "ready").touch()
while not (run / "checkpoints").exists():
    time.sleep(0.1)
"""

# Crashes with the exit statuses listed in a file.
CRASHES = """
import json, os, sys
from pathlib import Path
run = Path(sys.argv[1])
ends = (run / "ends").read_text().split()
(run / "ends").write_text(" ".join(ends[1:]))
with (run / "metrics.jsonl").open("a") as metrics:
    metrics.write(json.dumps({"step": int(ends[0])}) + "\\n")
os._exit(int(ends[0]))
"""

# Rank 0 writes the stage's record and ends; the other node's rank hangs, and ignores SIGTERM.
HANGS_AT_THE_END = """
import os, signal, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, signal.SIG_IGN)
run = Path(sys.argv[1])
if os.environ["RANK"] == "0":
    (run / "records").mkdir()
    (run / "record").rename(run / "records" / "train.json")
else:
    time.sleep(600)
"""

# At first, the last node's torchrun is stopped, and all ranks end their steps. Done after that.
HANGS = """
import os, signal, sys, time
from pathlib import Path
from hyperpod_ft import heartbeat
heartbeat.begin()
for step in range(1, 4):
    heartbeat.beat("step", step)
    time.sleep(1)
run = Path(sys.argv[1])
if not (run / "attempts" / "train.json").exists():
    if os.environ["RANK"] == "3":
        os.kill(int(os.environ["HYPERPOD_FT_HEARTBEATS"].split(":")[0]), signal.SIGSTOP)
    time.sleep(600)
if os.environ["RANK"] == "0":
    (run / "records").mkdir()
    (run / "record").rename(run / "records" / "train.json")
"""


@pytest.fixture(scope="module")
def three_nodes(slurm_installed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    cluster = LocalCluster(tmp_path_factory.mktemp("three"))
    cluster.up(nodes=3, cpus=4, bound_to=os.getpid())
    yield cluster
    cluster.down()


def state(cluster: LocalCluster, job: str) -> str:
    return slurm(cluster, "squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job}").strip()


def wait_for_state(cluster: LocalCluster, job: str, wanted: str, seconds: float = 600) -> None:
    def reached() -> bool:
        now = state(cluster, job)
        assert now == wanted or now not in ("FAILED", "COMPLETED", "CANCELLED", "TIMEOUT"), now
        return now == wanted

    wait_for(reached, seconds, lambda: state(cluster, job), every=0.5)


def submit(cluster: LocalCluster, run: Run, program: str, *options: str) -> str:
    """The rendered script of stage train, with `program` in place of the stage. Returns the job."""
    code = run.paths.root / "code-of-the-test"
    shutil.copytree(snapshot(run.paths.code_copies), code)
    (code / "hyperpod_ft" / "stages" / "train.py").write_text(f"def run():\n{indent(program, '    ')}\n    return 0\n")
    run.freeze()
    run.paths.logs.mkdir(parents=True)
    run.paths.script("train").parent.mkdir()
    run.paths.script("train").write_text(render(run, Installation(Path(sys.executable), code))["train"])
    return slurm(cluster, "sbatch", "--parsable", *options, str(run.paths.script("train"))).strip()


def said(run: Run, job: str) -> str:
    return run.paths.log("train", job).read_text()


def test_three_nodes_find_each_other(three_nodes: LocalCluster, make_run: MakeRun) -> None:
    """torchrun, health check, node names, port: all as in training; six ranks on three nodes."""
    run = make_run(cluster__nodes=3)
    job = submit(three_nodes, run, ALL_REDUCE)
    wait_for_state(three_nodes, job, "COMPLETED")
    ranks: list[dict[str, Any]] = [
        json.loads((run.paths.directory / f"rank-{rank}.json").read_text())
        for rank in range(run.plan.degrees.world_size)
    ]
    assert [rank["total"] for rank in ranks] == [21.0] * 6
    assert {rank["WORLD_SIZE"] for rank in ranks} == {"6"}
    assert {rank["LOCAL_WORLD_SIZE"] for rank in ranks} == {"2"}
    # two neighbouring ranks on each node, in the nodes' order: a tensor-parallel pair never leaves its node
    assert [(rank["SLURMD_NODENAME"], rank["GROUP_RANK"], rank["LOCAL_RANK"]) for rank in ranks] == [
        (f"node{node + 1}", str(node), str(local)) for node in range(3) for local in range(2)
    ]
    assert len({(rank["MASTER_ADDR"], rank["MASTER_PORT"]) for rank in ranks}) == 1
    assert run.paths.exit_marker("train", job).read_text() == "0\n"
    reports = sorted(path.name for path in run.paths.attempt_directory("train", job).iterdir())
    assert reports == [f"node-0-{number}.json" for number in range(3)]


def test_an_unfit_node_ends_the_job_before_it_trains(three_nodes: LocalCluster, make_run: MakeRun) -> None:
    """Its interpreter differs, by a stand-in for `python` that has a package more on one node."""
    run = make_run(cluster__nodes=2)
    odd = run.paths.root / "odd" / "torch_neuronx-1.0.dist-info"
    odd.mkdir(parents=True)
    (odd / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-neuronx\nVersion: 1.0\n")
    python = run.paths.root / "python"
    python.write_text(
        f'#!/bin/bash\n[[ ${{SLURMD_NODENAME:-}} == node2 && "$*" == *health* ]] && PYTHONPATH+=:{odd.parent}\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    run = make_run(cluster__nodes=2, env__python=str(python))
    job = submit(three_nodes, run, ALL_REDUCE)
    wait_for_end(three_nodes, job)
    assert state(three_nodes, job) == "FAILED"
    errors = [line for line in said(run, job).splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert errors[0].startswith(
        "error: health: node2: versions differ from the other nodes' (theirs): torch-neuronx 1.0 (missing);"
    )
    assert run.paths.exit_marker("train", job).read_text() == "2\n"
    assert attempts.history(run.paths, "train") == [], "it costs no restart"


def test_a_node_that_hangs_after_the_record_is_written_does_not_hold_the_job(
    three_nodes: LocalCluster, make_run: MakeRun
) -> None:
    run = make_run(cluster__nodes=2, parallelism={"ranks_per_node": 1, "tensor_parallel": 1})
    Record("train", run.plan["train"].fingerprint, {}, (), {}, utc_now(), 0.0, "", "").write(
        run.paths.directory / "record"
    )
    job = submit(three_nodes, run, HANGS_AT_THE_END)
    wait_for_state(three_nodes, job, "RUNNING")

    def recorded() -> bool:
        running = state(three_nodes, job) == "RUNNING"  # before: a job that ends meanwhile has written the record
        exists = run.paths.record_path("train").exists()
        assert exists or running
        return exists

    wait_for(recorded, 300, every=0.5)
    recorded_at = time.monotonic()
    wait_for_end(three_nodes, job)
    assert state(three_nodes, job) == "COMPLETED"
    assert time.monotonic() - recorded_at < 250, "torchrun alone waits for 300 s, srun for 60 more"
    assert run.paths.exit_marker("train", job).read_text() == "0\n"
    assert attempts.history(run.paths, "train") == []


def test_a_node_that_hangs_is_named_and_not_waited_for(three_nodes: LocalCluster, make_run: MakeRun) -> None:
    run = make_run(cluster__nodes=2)
    run.paths.directory.mkdir(parents=True)
    Record("train", run.plan["train"].fingerprint, {}, (), {}, utc_now(), 0.0, "", "").write(
        run.paths.directory / "record"
    )
    job = submit(three_nodes, run, HANGS, f"--export=ALL,{LIMIT}=5")
    wait_for_end(three_nodes, job)
    assert state(three_nodes, job) == "COMPLETED", said(run, job)
    (restart,) = attempts.history(run.paths, "train")
    assert restart.reason == "rank 2 on node2 hangs in step 4: its node does not answer"
    assert f"{restart.reason}; restart 1 of 3" in said(run, job)
    (stacks,) = hangs(run.paths.directory).iterdir()
    assert [file.name for file in sorted(stacks.iterdir())] == [f"rank-0000{rank}.txt" for rank in range(3)]


def wait_for_end(cluster: LocalCluster, job: str) -> None:
    wait_for(
        lambda: state(cluster, job) in ("FAILED", "COMPLETED", "CANCELLED"),
        600,
        what=lambda: state(cluster, job),
        every=0.5,
    )


def test_a_time_limit_that_is_too_short_only_takes_longer(three_nodes: LocalCluster, make_run: MakeRun) -> None:
    """Slurm gives notice before the limit, and the next job in the chain waits on.

    The limit comes near when the rank is ready for it, however long that takes, and is out of sight for the next start.
    """
    run = make_run(cluster__time_limit="60", parallelism={"ranks_per_node": 1, "tensor_parallel": 1})
    begun = time.monotonic()
    job = submit(three_nodes, run, ONE_STEP_A_NOTICE)
    out = str(run.paths.directory / "next.out")
    following = slurm(
        three_nodes, "sbatch", "--parsable", f"--output={out}", f"--dependency=afterok:{job}", "--wrap", "true"
    ).strip()

    def limit(minutes: int) -> None:
        slurm(three_nodes, "scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}")

    wait_for((run.paths.directory / "ready").exists, every=0.1)
    limit(int(time.monotonic() - begun) // 60 + 3)  # closer than the five minutes at which notice is due
    wait_for(run.paths.checkpoints_by_step, every=0.1)
    limit(60)
    wait_for_state(three_nodes, following, "COMPLETED")
    assert state(three_nodes, job) == "COMPLETED"
    assert "requeued and resumes from step 1" in said(run, job)
    assert [(restart.cause, restart.checkpoint) for restart in attempts.history(run.paths, "train")] == [
        ("time limit", 1)
    ]


def test_crashes_are_retried_until_they_repeat_themselves(three_nodes: LocalCluster, make_run: MakeRun) -> None:
    run = make_run(parallelism={"ranks_per_node": 1, "tensor_parallel": 1})
    run.paths.directory.mkdir(parents=True)
    ends = run.paths.directory / "ends"
    ends.write_text("3 4 4 0")
    job = submit(three_nodes, run, CRASHES)
    wait_for_end(three_nodes, job)
    assert [restart.reason for restart in attempts.history(run.paths, "train")] == [
        "rank 0: exit 3 at step 3",
        "rank 0: exit 4 at step 4",
    ]
    assert "rank 0: exit 4 at step 4; restart 2 of 3 in 2 s" in said(run, job)
    assert "train: rank 0: exit 4 at step 4, " in said(run, job)
    assert run.paths.exit_marker("train", job).read_text() == "4\n"
    assert ends.read_text() == "0"
