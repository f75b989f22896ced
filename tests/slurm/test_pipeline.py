"""The whole chain on a real Slurm: failing in the middle, resumed and done, killed, cancelled.

The model is the shipped tiny Llama, its data are questions, and the training is short. The quickstart's own:
tests/pages/test_first_pages.py.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import restarts
from hyperpod_ft.checkpoint.sharded import description
from hyperpod_ft.config.run_file import resolve, validate
from hyperpod_ft.errors import UserError
from hyperpod_ft.localcluster import LocalCluster
from hyperpod_ft.runs.attempts import history
from hyperpod_ft.runs.records import unix_time
from hyperpod_ft.runs.results import places
from hyperpod_ft.runs.run import Run
from tests.slurm.conftest import TOKEN
from tests.slurm.head import Head
from tests.slurm.holding import hold, release, write_interpreter
from tests.training.conftest import Jobs, fork_server, jobs  # noqa: F401 - fixtures
from tests.unit.stage_runs import finish
from tests.unit.tracking.conftest import losses

pytestmark = [pytest.mark.slurm, pytest.mark.training, pytest.mark.timeout(1200)]

STEPS = 6
ODD = "a b$(id)'\""
STAGES = ["env", "download", "certify", "dataset", "train", "consolidate", "merge", "generate"]


def values(root: Path, nodes: int = 2, **training: Any) -> dict[str, Any]:
    return {
        "name": "pipeline",
        "engine": "torch",
        "cluster": {"root": str(root), "instance_type": "local", "nodes": nodes, "environment": {"ODD": ODD}},
        "env": {"python": str(root.parent / "python")},
        "model": {"source": "example:tiny-llama"},
        "dataset": {"source": "example:qa", "format": "dolly", "max_length": 256, "validation_share": 0.05},
        "training": {"precision": "fp32", "max_steps": 6, "save_every_steps": 2, "learning_rate": 2e-2} | training,
        # What is tested is the chain, not the layout: one rank a node starts in half the time of two.
        "parallelism": {"tensor_parallel": 1, "ranks_per_node": 1},
        "generate": {
            "max_new_tokens": 4,
            "train_samples": 2,
            "validation_samples": 2,
            "prompts": ["### Instruction\n"],
        },
    }


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with a space and letters beyond ASCII, for all tests of this module: they share what runs share.

    The interpreter beside it breaks in stage dataset while it has a neighbour `broken`, as a half-upgraded one does.
    """
    volume = tmp_path_factory.mktemp("volume")
    write_interpreter(
        volume / "python",
        '[[ -e "${0%/*}/broken" && "$*" == *stages.dataset* ]] && '
        "{ echo 'libneuron.so: cannot open shared object file' >&2; exit 127; }\n",
    )
    return volume / "two words größe"


@contextlib.contextmanager
def no_job_starts(head: Head) -> Iterator[None]:
    head.slurm("scontrol", "update", "partitionname=dev", "state=down")
    try:
        yield
    finally:
        head.slurm("scontrol", "update", "partitionname=dev", "state=up")


def metrics(directory: str) -> list[dict[str, Any]]:
    path = Path(directory, "metrics.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_run_that_fails_is_resumed_and_leaves_what_was_promised(head: Head, shared: Path) -> None:
    content = values(shared, nodes=1, max_steps=STEPS) | {"name": "promised"}
    run_file = head.write(content)
    broken = shared.parent / "broken"
    broken.touch()
    with no_job_starts(head):
        # two submissions at once: one wins, the other is refused
        attempts = [head.start("submit", run_file) for _ in range(2)]
        ended = [(attempt.communicate()[0], attempt.returncode) for attempt in attempts]
        (won, _), (refused, _) = sorted(ended, key=lambda end: end[1] or 0)
        assert sorted(status for _, status in ended) == [0, 2], ended
        assert "still at work" in refused
        run_id = won.split("Submitted promised/")[1].split(":")[0]
        submitted = json.loads((shared / "runs" / "promised" / run_id / "jobs.json").read_text())
        assert [job["stage"] for job in submitted] == STAGES
        described = [head.slurm("scontrol", "show", "job", job["job_id"]) for job in submitted]
        assert "afterok" in described[2], "dataset waits for env and download"
    head.wait_for_the_queue()

    status = head.status(exit_status=1)
    assert status["state"] == "failed"
    states = {stage["stage"]: stage["state"] for stage in status["stages"]}
    assert states["env"] == states["download"] == "done"
    assert states["dataset"] == "failed"
    assert {states[stage] for stage in STAGES[4:]} == {"cancelled"}
    text = head("status", status=1)
    assert "dataset failed: exit status 127" in text
    assert "| libneuron.so: cannot open shared object file" in text
    assert f"hyperpod-ft resume {os.path.relpath(status['directory'], head.directory)}" in text or (
        f"hyperpod-ft resume {status['directory']}" in text
    )

    broken.unlink()
    assert "env, download" in head("resume"), "are named as skipped"
    head.wait_for_the_queue(seconds=540)
    status = head.status()
    assert [stage["state"] for stage in status["stages"]] == ["done"] * len(STAGES)
    run = Run.open(Path(status["directory"]))
    samples = json.loads(run.paths.samples_path.read_text())
    assert samples["exact_match"]["validation"]["rows"] == 2
    assert samples["validation_loss"]["tuned"]["mean"] < samples["validation_loss"]["base"]["mean"]

    written = {"adapter_config.json", "adapter_model.safetensors", "XXH128SUMS", "chat_template.jinja"}
    assert {path.name for path in run.paths.adapter.iterdir()} == written
    assert {"config.json", "README.md", "tokenizer.json"} <= {path.name for path in run.paths.tuned_model.iterdir()}
    submitted = json.loads(run.paths.jobs_path.read_text())
    assert [job["stage"] for job in submitted] == [*STAGES, *STAGES[3:]]
    jobs_of_stages = {job["stage"]: job["job_id"] for job in submitted}
    for stage in STAGES:
        record = run.journal.record(stage)
        assert record is not None and record.job_id == jobs_of_stages[stage]
        assert all(len(output.digest) in (32, 64) for output in record.outputs)

    # a second submission of a finished run submits nothing and says so
    assert "Nothing to submit" in head("submit", run_file)
    assert json.loads(run.paths.jobs_path.read_text()) == submitted
    assert "skip" in head("plan", run_file)
    assert "promised/" + run_id in head("list", str(shared))
    assert "generate" in head("logs", "generate")

    # what follows training may change within the run
    changed = head.write(content | {"generate": {"prompts": ["x"], "max_new_tokens": 2}}, "changed.yaml")
    plan = json.loads(head("plan", changed, "--json"))
    assert [stage["name"] for stage in plan["stages"] if stage["runs"]] == ["generate"]
    assert plan["run_id"] == run_id
    assert plan["total_steps"] == STEPS == len(metrics(status["directory"]))

    # the token is nowhere, and values were never executed
    assert all(TOKEN not in text for text in described)
    for file in shared.rglob("*"):
        if file.is_file() and file.stat().st_size < 5 << 20:
            assert TOKEN.encode() not in file.read_bytes(), file

    # the run directory alone is enough for plain sbatch
    run.paths.record_path("consolidate").unlink()
    job = head.slurm("sbatch", "--parsable", str(run.paths.script("consolidate"))).strip()
    head.wait(lambda: run.journal.is_done("consolidate"))
    assert run.journal.record("consolidate").job_id == job  # type: ignore[union-attr]


def newest_is_of_a_resumed_training(run: Run) -> bool:
    """Whether the newest checkpoint was saved after training had resumed from an earlier one."""
    newest = max(run.paths.checkpoints_by_step().items())[1]
    try:
        return bool(description.read(newest).progress["resumed_from"])
    except UserError:  # not complete, or just removed
        return False


def test_training_resumes_after_a_dead_node_and_a_kill_as_if_nothing_had_happened(
    head: Head,
    shared: Path,
    cluster: LocalCluster,
    jobs: Jobs,  # noqa: F811
) -> None:
    """Slurm requeues the job of a node that died; a training whose processes were all killed waits for `resume`.

    Its losses are those of the same ranks on this machine, undisturbed.
    """
    content = values(shared, max_steps=48, save_every_steps=4)
    python = Path(content["env"]["python"])
    hold(python, "killed", 6)
    head("submit", head.write(content | {"name": "killed"}, "killed.yaml"))
    directory = str(head.status()["directory"])
    run = Run.open(Path(directory))
    head.wait(lambda: len(metrics(directory)) >= 6 and run.paths.checkpoints_by_step(), every=0.05)
    cluster.kill_node("node2")
    head.slurm("scontrol", "update", "nodename=node2", "state=down", "reason=power")
    hold(python, "killed", 10)
    release(python, "killed", 6)
    cluster.start_node("node2")
    head.wait(lambda: newest_is_of_a_resumed_training(run), every=0.05)
    for process in processes_of(directory):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(process.name), signal.SIGKILL)
    release(python, "killed", 10)
    head.wait_for_the_queue()
    assert head.status("killed.yaml", exit_status=1)["state"] == "failed"
    newest = max(run.paths.checkpoints_by_step())
    head("resume", "killed.yaml")
    head.wait(lambda: run.journal.is_done("train"))
    head("cancel")

    undisturbed = Run.of(resolve(validate(content | {"name": "undisturbed"}, ""), head.directory))
    undisturbed.freeze()
    finish(undisturbed, "env")
    jobs.train(undisturbed)
    found = [(row["step"], row["loss"]) for row in metrics(directory)]
    assert [step for step, _ in found] == list(range(1, 49))
    assert found == [(row["step"], row["loss"]) for row in metrics(str(undisturbed.paths.directory))]
    after_the_node, after_the_kill = run.journal.record("train").facts["resumed_from"]  # type: ignore[union-attr]
    assert after_the_node % 4 == 0 and after_the_kill == newest > after_the_node


def test_training_goes_on_with_fewer_nodes_and_returns_to_all(head: Head, shared: Path, cluster: LocalCluster) -> None:
    content = values(shared, max_steps=4000, save_every_steps=10) | {"name": "fewer"}
    content["cluster"]["min_nodes"] = 1
    head("submit", head.write(content))
    directory = str(head.status()["directory"])
    run = Run.open(Path(directory))

    def nodes() -> list[int]:
        return [place.nodes for place in places.read(run.paths)]

    head.wait(lambda: len(metrics(directory)) >= 12)
    cluster.kill_node("node2")
    head.slurm("scontrol", "update", "nodename=node2", "state=down", "reason=power")
    head.wait(lambda: nodes() == [2, 1])
    cluster.start_node("node2")
    head.wait(lambda: nodes() == [2, 1, 2])
    training = next(stage for stage in head.status()["stages"] if stage["stage"] == "train")
    assert training["restarts"] == "continued once on more nodes"
    head("cancel")
    head.wait_for_the_queue()
    rows = metrics(directory)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)), "one curve"
    assert Run.open(Path(directory)) == run, "what it wants is what it was submitted with"


def test_cancel_leaves_nothing_running_and_resume_goes_on(head: Head, shared: Path) -> None:
    """On another number of nodes: the same run, and one curve."""
    run_file = head.write(values(shared, max_steps=4000, save_every_steps=10_000) | {"name": "cancelled"})
    head("submit", run_file)
    directory = head.status()["directory"]
    head.wait(lambda: len(metrics(directory)) >= 2)
    progress = head.status()["training"]
    assert progress["total_steps"] == 4000 and progress["step"] >= 2
    assert "cancelled train" in head("cancel")
    head.wait_for_the_queue()
    states = {stage["stage"]: stage["state"] for stage in head.status()["stages"]}
    assert states["train"] == states["merge"] == "cancelled"
    saved = [path.name for path in Path(directory, "checkpoints").iterdir()]
    last_step = metrics(directory)[-1]["step"]
    assert f"step-{last_step:08d}" in saved, "it saved the current step before it stopped"
    left = subprocess.run(["pgrep", "--full", directory], capture_output=True, text=True, check=False).stdout
    assert left == "" and processes_of(directory) == []
    assert "nothing to cancel" in head("cancel")

    refused = head("resume", "--set", "cluster.nodes=3", status=2)
    assert "a step has 2 rows, which 3 data-parallel ranks (dp 3 x tp 1) cannot share" in refused
    assert "gradient_accumulation_steps 2 x 1 data-parallel ranks, 2 rows a step" in head(
        "resume", "--set", "cluster.nodes=1"
    )
    head.wait(lambda: metrics(directory)[-1]["step"] >= last_step + 3)
    moved = head.status()
    assert moved["directory"] == directory
    assert [(place["step"], place["nodes"]) for place in moved["places"]] == [(1, 2), (last_step + 1, 1)]
    head("cancel")
    head.wait_for_the_queue()
    rows = metrics(directory)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert f"from step {last_step + 1}: 1 x local (dp 1 x tp 1)" in head("status")


def test_what_to_do_without_slurm(tmp_path: Path, shared: Path) -> None:
    head = Head(tmp_path, {"PATH": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")})
    run_file = head.write(values(shared, max_steps=3) | {"name": "none"})
    output = head("submit", run_file, status=2)
    assert "squeue" in output and "hyperpod-ft local up" in output and "--launcher process" in output


def test_a_crash_and_a_notice_of_the_time_limit_need_no_user(head: Head, shared: Path) -> None:
    tracking = {"trackers": ["tensorboard"], "python": sys.executable}
    training = {"max_steps": 60, "save_every_steps": 5, "memory_checkpoint_every_steps": 1}
    content = values(shared, nodes=1, **training) | {"name": "by-itself", "tracking": tracking}
    python = Path(content["env"]["python"])
    hold(python, "by-itself", 8)
    head("submit", head.write(content))
    directory = head.status()["directory"]
    run = Run.open(Path(directory))
    head.wait(lambda: len(metrics(directory)) >= 8, every=0.05)
    programs = launchers_of(directory)
    hold(python, "by-itself", 12)
    os.kill(ranks_of(directory)[0], signal.SIGKILL)
    release(python, "by-itself", 8)
    head.wait(lambda: run.paths.restarts_path("train").exists())
    training = next(stage for stage in head.status()["stages"] if stage["stage"] == "train")
    assert training["state"] == "running"
    assert training["restarts"].startswith("restart 1 of 3 (rank ")
    assert "restart 1 of 3 (rank " in head("status")

    head.wait(lambda: metrics(directory)[-1]["step"] >= 12 and ranks_of(directory), every=0.05)
    assert launchers_of(directory) == programs, "srun and all else but the rank has stayed"
    head.slurm("scancel", "--batch", "--signal=USR1", training["job_id"])
    head.wait(lambda: len(history(run.paths, "train")) == 2)
    release(python, "by-itself", 12)
    head.wait(lambda: run.journal.is_done("consolidate"))
    states = {stage["stage"]: stage["state"] for stage in head.status()["stages"]}
    assert states["train"] == states["consolidate"] == "done", "what depended on it has waited"
    head("cancel")
    assert [row["step"] for row in metrics(directory)] == list(range(1, 61))
    record = run.journal.record("train")
    assert record is not None and record.job_id == training["job_id"]
    assert [restart["cause"] for restart in record.facts["restarts"]] == ["crash", "time limit"]
    assert ": SIGKILL at step " in record.facts["restarts"][0]["reason"]
    assert record.facts["restarts"][0]["step"] - record.facts["resumed_from"][0] in (0, 1), "the crash cost a step"
    saved = record.facts["restarts"][1]
    assert saved["checkpoint"] == saved["step"] == record.facts["resumed_from"][-1], "notice cost no step"
    # all of the time that Slurm gave the job is accounted for, and the crash has its part
    status = head.status()
    log, marker = (of("train", record.job_id) for of in (run.paths.log, run.paths.exit_marker))
    begun, again = (unix_time(time) for time in re.findall(r"^== train job \d+ on \S+, (\S+)$", log.read_text(), re.M))
    given = unix_time(saved["time"]) - begun + marker.stat().st_mtime - again
    parts, (crash, *_) = status["held"]["parts"], status["held"]["lost"]
    used = sum(parts.values()) + sum(lost["node_seconds"] for lost in status["held"]["lost"])
    assert status["goodput"] == pytest.approx(parts["step"] / used, abs=1e-4)
    assert used == pytest.approx(given, abs=1) and parts["other"] < 2
    assert crash["reason"] == record.facts["restarts"][0]["reason"] and crash["node_seconds"] > 0
    assert f"{status['goodput']:.0%}" in head("list", str(shared))
    # neither the crash nor the requeued job left a gap in the tracker, or a step that is there twice
    assert losses(run) == [(row["step"], pytest.approx(row["loss"])) for row in metrics(directory)]


def test_the_benchmark_of_restarts_runs(tmp_path: Path) -> None:
    found = restarts.measure(tmp_path, restarts.FAILURES["kill -9 of a rank, two nodes, memory checkpoints"])
    assert 0 < found.seconds < 120 and found.steps <= 5, "the volume has no step from 11 to 19"
    assert found.cost


def processes_of(directory: str) -> list[Path]:
    """The directories in /proc of the processes of a run's jobs: their scripts change to the run's directory."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cwd").readlink() == Path(directory):
                found.append(process)
    return found


def launchers_of(directory: str) -> set[int]:
    """What starts the ranks of a run: srun, torchrun, and the process that they are forked from."""
    found = set()
    for process in processes_of(directory):
        with contextlib.suppress(OSError):
            command = (process / "cmdline").read_bytes()
            starts = b"hyperpod_ft.job." in command and not (process / "comm").read_text().startswith("rank ")
            if starts and b"hyperpod_ft.job.health" not in command:
                found.add(int(process.name))
    return found


def ranks_of(directory: str) -> list[int]:
    """The processes that train a run, without those that started them."""
    found = []
    for process in processes_of(directory):
        with contextlib.suppress(OSError):
            if (process / "comm").read_text().startswith("rank "):
                found.append(int(process.name))
    return found
