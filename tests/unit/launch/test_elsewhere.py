"""`resume --set`: the same run on other nodes or with other degrees, and what makes it another one."""

from typing import Any

import pytest

from hyperpod_ft.cli.submitting import submit_and_follow
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.elsewhere import elsewhere
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.launch.process.launcher import ProcessLauncher
from hyperpod_ft.runs.jobs import Job
from hyperpod_ft.runs.records import utc_now
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.selection import Selection
from tests.conftest import MakeRun

P5: dict[str, Any] = {
    "cluster__instance_type": "p5.48xlarge",
    "cluster__nodes": 4,
    "parallelism": {"tensor_parallel": 8},
    "training__micro_batch_size": 4,
    "training__gradient_accumulation_steps": 3,
}


def frozen(make_run: MakeRun, **overrides: Any) -> Run:
    run = make_run(**P5 | overrides)
    run.freeze()
    return run


@pytest.mark.parametrize(
    ("chosen", "micro_batch_size", "accumulation"),
    [
        (["cluster.nodes=3"], 4, 4),
        (["cluster.nodes=8"], 3, 2),
        (["cluster.nodes=1", "cluster.partition=dev"], 4, 12),
        (["parallelism.tensor_parallel=4"], 3, 2),
        (["parallelism.pipeline_parallel=4"], 4, 12),
        (["cluster.instance_type=p4d.24xlarge", "training.micro_batch_size=2"], 2, 6),
        (["cluster.instance_type=trn2.48xlarge", "parallelism.tensor_parallel=16"], 3, 1),
    ],
)
def test_a_step_keeps_its_rows(make_run: MakeRun, chosen: list[str], micro_batch_size: int, accumulation: int) -> None:
    run = frozen(make_run)
    moved = elsewhere(Run.open(run.paths.directory), chosen)
    training = moved.config.training
    assert (training.micro_batch_size, training.gradient_accumulation_steps) == (micro_batch_size, accumulation)
    assert moved.config.rows_per_step(moved.plan.degrees.data_parallel) == 48
    assert moved.paths.directory == run.paths.directory
    assert elsewhere(moved, []).plan == moved.plan


def test_a_pipeline_gets_the_micro_batches_that_it_needs(make_run: MakeRun) -> None:
    """48 rows are 12 micro batches of 4, fewer than its 16 stages."""
    moved = elsewhere(frozen(make_run), ["cluster.nodes=16", "parallelism.pipeline_parallel=16"])
    assert moved.config.training.micro_batch_size == 3
    assert moved.config.training.gradient_accumulation_steps == 16


@pytest.mark.parametrize(
    ("overrides", "chosen", "words"),
    [
        (
            {},
            ["cluster.nodes=5"],
            r"a step has 48 rows, which 5 data-parallel ranks \(dp 5 x tp 8\) cannot share: 48 / 5 = 9\.60; choose"
            r" nodes or degrees with 4 or 6 data-parallel ranks",
        ),
        (
            {},
            ["cluster.nodes=3", "training.gradient_accumulation_steps=3"],
            r"--set training\.gradient_accumulation_steps: 3 does not keep 48 rows a step on 3 data-parallel ranks;"
            r" leave it out; 4 would",
        ),
        (
            {},
            ["training.learning_rate=1.0"],
            r"--set training\.learning_rate: this training cannot continue so; start another run: hyperpod-ft submit",
        ),
        ({}, ["seed=1"], "--set seed: resume sets only keys of cluster, parallelism, training, sagemaker; run: hyper"),
        ({}, ["cluster.root=/elsewhere"], r"--set cluster\.root: this training cannot continue so; start"),
        ({}, ["parallelism.tensor_parallel=3"], "3 x pipeline_parallel 1 = 3 does not divide 4 nodes x 8 ranks = 32"),
        ({}, ["parallelism.pipeline_parallel=64"], "does not divide"),
        (
            {"lora__dropout": 0.1},
            ["cluster.nodes=2"],
            r"--set cluster\.nodes: this training cannot continue so \(docs/reliability\.md says why\); start another",
        ),
    ],
)
def test_what_would_be_another_run_is_refused(
    make_run: MakeRun, overrides: dict[str, Any], chosen: list[str], words: str
) -> None:
    run = frozen(make_run, **overrides)
    with pytest.raises(UserError, match=words):
        elsewhere(run, chosen)
    assert Run.open(run.paths.directory) == run


def test_a_run_stays_where_it_is_until_the_launcher_takes_it(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    class Partitions(ProcessLauncher):
        def submit(self, run: Run, stages: object, *other: object) -> None:
            if run.config.cluster.partition == "typo":
                raise UserError("sbatch train: no such partition")
            run.journal.add_job(Job("train", "7", self.name, utc_now()))

    run = frozen(make_run)
    files = {path: path.read_bytes() for path in (run.paths.config_path, run.paths.plan_path)}
    launchers = Launchers((Partitions(),))

    def resume(*chosen: str) -> str:
        opened = Run.open(run.paths.directory)
        submit_and_follow(elsewhere(opened, chosen), launchers, "process", Selection(), watch=False, moved=True)
        return capsys.readouterr().out

    with pytest.raises(UserError, match="no such partition"):
        resume("cluster.nodes=3", "cluster.partition=typo")
    assert {path: path.read_bytes() for path in files} == files and "Continues" not in capsys.readouterr().out
    assert "Continues on 3 x p5.48xlarge" in resume("cluster.nodes=3")
    assert Run.open(run.paths.directory).config.cluster.nodes == 3
