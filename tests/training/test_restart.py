"""Jobs of several ranks that are killed, stopped or misused, as on a cluster."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from hyperpod_ft.digests import text_sha256
from hyperpod_ft.localcluster.ports import reserve_ports
from hyperpod_ft.runs.results import holdings, usage
from hyperpod_ft.runs.run import Run
from tests.training.conftest import Jobs, Launched, MakeRun, curve, metrics
from tests.unit.small_volume import small_volume
from tests.waiting import wait_for

pytestmark = pytest.mark.training

LAYOUT = {"parallelism": {"ranks_per_node": 4, "tensor_parallel": 2}, "training.micro_batch_size": 1}
TWO_RANKS = LAYOUT | {"parallelism": {"ranks_per_node": 2, "tensor_parallel": 2}}
# dropout makes the random state matter
DROPOUT = {"lora": {"r": 4, "alpha": 8, "dropout": 0.1, "dora": True, "plus_ratio": 4}}
EIGHT_STEPS = LAYOUT | DROPOUT | {"training.max_steps": 8}


@pytest.fixture
def lost(make_run: MakeRun) -> Iterator[Run]:
    """A run for `lose_a_node`. Before `jobs` in a test: what they leave in memory is removed when they have ended."""
    every = {"training.save_every_steps": 6, "training.memory_checkpoint_every_steps": 2}
    run = make_run("lost", EIGHT_STEPS | every)
    yield run
    for memory in memories(run):
        shutil.rmtree(memory)


def test_kill_9_half_way_changes_no_loss(make_run: MakeRun, lost: Run, jobs: Jobs) -> None:
    settings = EIGHT_STEPS | {"training.save_every_steps": 3}
    undisturbed, killed = make_run("undisturbed", settings), make_run("killed", settings)
    jobs.train(undisturbed)
    lose_a_node(lost, jobs)
    assert curve(lost) == curve(undisturbed)
    record = lost.journal.record("train")
    assert record is not None and record.facts["resumed_from"] == [4]
    last = [sorted(run.paths.checkpoint(8).glob("*.distcp")) for run in (lost, undisturbed)]
    assert [file.read_bytes() for file in last[0]] == [file.read_bytes() for file in last[1]]

    jobs.environment = {}

    jobs.start_held(killed, after_step=4).kill()
    assert len(metrics(killed)) == 4 and killed.journal.record("train") is None
    said = jobs.train(killed)

    # bit for bit on CPU
    assert curve(killed) == curve(undisturbed)
    assert [row["step"] for row in metrics(killed)] == list(range(1, 9))
    record = killed.journal.record("train")
    assert record is not None and record.facts["resumed_from"] == [3]
    assert "from step 3\n" in said
    # the killed attempt is on the bill, though its last steps were trained again
    attempts = usage.read(killed.paths)
    assert record.facts["attempts"] == len(attempts) == 2
    assert record.facts["node_hours"] * 3600 >= sum(each.seconds for each in attempts) - 0.2, "to four digits"
    held = holdings.read(killed)
    assert held and held.node_hours == pytest.approx(record.facts["node_hours"], abs=1e-4), "no job that ends later"


def lose_a_node(run: Run, jobs: Jobs) -> None:
    """Train with two nodes, of which one is lost after step 5; its job goes on with another, and in another order."""

    ports = reserve_ports(1)

    def start_on(*nodes: str) -> list[Launched]:
        return [start(jobs, run, ports.first, number, node) for number, node in enumerate(nodes)]

    with ports.lock:  # no other process gets the port before rank 0 binds it
        jobs.held_after = 5
        started = start_on("node1", "node2")
        started[0].wait_for(lambda: run.paths.metrics_path.exists() and len(metrics(run)) == 5)
        (memory,) = memories(run)
        assert memory.stat().st_mode & 0o777 == 0o700
        marks = "*/rank-*.0.json"
        wait_for(lambda: len(list(memory.glob(marks))) == 8, what="each node has its states, and the other's")
        for job in started:
            job.kill()
        shutil.rmtree(memory / "node2")
        jobs.held_after = 0
        for job in (started := start_on("node3", "node1")):
            assert job.wait() == 0, job.text()
    assert "train: step 4 is in the nodes' memory\n" in started[0].text()
    assert not memories(run)


def start(jobs: Jobs, run: Run, port: int, number: int, node: str) -> Launched:
    """The ranks of one of two nodes of a job."""
    jobs.environment = {"HYPERPOD_FT_JOB_ID": "7", "SLURM_JOB_ID": "7", "SLURMD_NODENAME": node}
    meeting = ["--nnodes=2", f"--node-rank={number}", "--master-addr=127.0.0.1", f"--master-port={port}"]
    program = ["-m", "hyperpod_ft.stages.train", str(run.paths.directory)]
    return jobs.start(1, ["forking_torchrun", "--nproc-per-node=2", *meeting, *program])


def memories(run: Run) -> list[Path]:
    """The directories that jobs of a run have in this machine's memory."""
    job = text_sha256(f"{run.paths.directory} 7")[:12]
    return list(Path("/dev/shm").glob(f"hyperpod-ft-*-{job}"))


def test_a_file_that_another_rank_wrote_is_damaged(make_run: MakeRun, jobs: Jobs) -> None:
    run = make_run(settings=TWO_RANKS | {"training.save_every_steps": 2})
    jobs.train(run)
    whole = curve(run)
    run.paths.record_path("train").unlink()
    file = run.paths.checkpoints / "step-00000004" / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    said = jobs.train(run)
    assert said.count("ignoring checkpoint step-00000004: __1_0.distcp is damaged") == 1
    assert "from step 2\n" in said and curve(run) == whole


def test_a_full_volume_is_one_line(make_run: MakeRun, jobs: Jobs) -> None:
    run = make_run(settings=TWO_RANKS)
    with small_volume(run.paths.checkpoints, 32 << 10):
        said = jobs.train(run, expect=1)
        assert list(run.paths.checkpoints.iterdir()) == []
    assert [line for line in said.splitlines() if line.startswith("error: ")] == [
        f"error: train: {run.paths.checkpoints}: the checkpoint cannot be written: No space left on device;"
        " free or repair the volume, then resume"
    ]
    assert "CheckpointException" not in said


def test_errors_are_one_line_and_every_rank_ends(make_run: MakeRun, jobs: Jobs) -> None:
    run = make_run(settings=TWO_RANKS | {"lora": {"target_modules": ["nothing"]}})
    said = jobs.train(run, expect=1)  # torchrun's own status for a failed worker
    assert [line for line in said.splitlines() if line.startswith("error: ")] == [
        "error: train: lora.target_modules: 'nothing' matches no module of the model; set it to some of those"
        " that it has: down_proj, embed_tokens, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj"
    ]
    # the wrong number of processes
    job = jobs.start(1, ["hyperpod_ft.stages.train", str(run.paths.directory)])
    assert job.wait() == 2
    assert "started as 1 process(es), but the run's nodes x ranks_per_node = 2" in job.text()
