"""Nodes that share no volume: each keeps its own part of a checkpoint, and needs those of others to continue."""

import shutil
from pathlib import Path

from hyperpod_ft.checkpoint.sharded import description
from hyperpod_ft.localcluster.ports import reserve_ports
from hyperpod_ft.runs.run import Run
from tests.training.conftest import Jobs, MakeRun, curve
from tests.unit.stage_runs import tree

SETTINGS = {
    "cluster.nodes": 2,
    "parallelism.tensor_parallel": 1,
    "training.method": "full",
    "training.max_steps": 6,
    "training.save_every_steps": 2,
    "training.validate_every_steps": None,
}


def on_nodes(jobs: Jobs, programs: list[list[str]]) -> None:
    """One rank on each node, to its end; rank 0 hosts the store."""
    ports = reserve_ports(1)  # no other process gets the port before rank 0 binds it
    with ports.lock:
        started = []
        for rank, program in enumerate(programs):
            jobs.environment = {
                "RANK": str(rank),
                "LOCAL_RANK": "0",
                "WORLD_SIZE": str(len(programs)),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(ports.first),
            }
            started.append(jobs.start(1, program))
        for job in started:
            assert job.wait() == 0, job.text()


def train_on_nodes(jobs: Jobs, runs: list[Run]) -> None:
    """Each has the run below a root of its own."""
    on_nodes(jobs, [["hyperpod_ft.stages.train", str(run.paths.directory)] for run in runs])


def files(run: Run, step: int) -> dict[str, bytes]:
    found = tree(run.paths.checkpoint(step))
    del found[description.NAME]
    return found


def test_the_store_outlives_the_slowest_reader(jobs: Jobs) -> None:
    on_nodes(jobs, [["slow_reader_worker"]] * 3)


def test_nodes_keep_their_parts_and_continue_from_all(jobs: Jobs, make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run("run", SETTINGS | {"cluster.root": str(tmp_path / name)}) for name in ("one", "two")]
    train_on_nodes(jobs, runs)
    losses = curve(runs[0])
    for run in runs:
        # the first one was removed on each
        assert [path.name for path in sorted(run.paths.checkpoints.iterdir())] == ["step-00000004", "step-00000006"]
    last = [files(run, 6) for run in runs]
    assert not last[0].keys() & last[1].keys()
    described = description.read(runs[1].paths.checkpoint(6))
    assert described.files == {name: len(content) for part in last for name, content in part.items()}

    lose_the_job_after_step_4(runs)
    train_on_nodes(jobs, runs)
    assert "ignoring checkpoint step-00000004: __1_0.distcp is missing" in jobs.started[2].text()
    assert curve(runs[0]) == losses

    lose_the_job_after_step_4(runs)
    for run, other in (runs, runs[::-1]):  # each node gets the files of both
        shutil.copytree(other.paths.checkpoint(4), run.paths.checkpoint(4), dirs_exist_ok=True)
    train_on_nodes(jobs, runs)
    assert "from step 4" in jobs.started[4].text() and curve(runs[0]) == losses
    again = [files(run, 6) for run in runs]
    for part in (*last, *again):
        part.pop(".metadata", None)  # has the paths of the volume
    assert again == last


def lose_the_job_after_step_4(runs: list[Run]) -> None:
    for run in runs:
        shutil.rmtree(run.paths.checkpoint(6))
    runs[0].paths.record_path("train").unlink()
