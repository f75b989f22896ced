"""Section eval and the command eval: which stages a run gets, what is refused, and what a submission selects."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hyperpod_ft import publish
from hyperpod_ft.cli.main import app
from hyperpod_ft.config import run_file
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch import launchers
from hyperpod_ft.launch.finished import with_evaluation
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.launch.process.launcher import ProcessLauncher
from hyperpod_ft.launch.render import Installation, render
from hyperpod_ft.launch.submit import submit
from hyperpod_ft.runs.jobs import Job
from hyperpod_ft.runs.records import outputs_of
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.selection import Selection, choose
from tests.conftest import MakeRun
from tests.unit.stage_runs import finish

SECTION = {"tasks": ["arc_easy"]}
TRAINING_JOBS = {"region": "us-east-1", "role": "arn:aws:iam::123456789012:role/r", "store": "s3://bucket/runs"}
OTHERS = ("env", "download", "certify", "dataset", "train", "consolidate", "merge", "generate")


def finished(make_run: MakeRun, **overrides: Any) -> Run:
    run = make_run(**overrides)
    run.freeze()
    for stage in run.plan.stages:
        if stage.name in OTHERS:
            finish(run, stage.name)
    return run


def chosen(run: Run, **selection: Any) -> list[str]:
    return [stage.name for stage in choose(run, Selection(**selection))]


def test_the_section_adds_two_stages_and_changes_no_run(make_run: MakeRun) -> None:
    without, run = make_run(), make_run(eval=SECTION)
    assert [stage.name for stage in without.plan.stages] == list(OTHERS)
    added = [stage for stage in run.plan.stages if stage.name not in OTHERS]
    assert [(stage.name, stage.needs) for stage in added] == [
        ("tasks", ("env",)),
        ("eval", ("env", "download", "tasks", "merge")),
    ]
    assert run.paths.directory == without.paths.directory and added[0].shared and not added[1].shared
    other = make_run(eval=SECTION | {"limit": 10})
    assert other.plan["tasks"] == run.plan["tasks"] and other.paths.record_path("eval") != run.paths.record_path("eval")


def test_a_gpu_node_evaluates_and_the_cpus_of_trainium_do(make_run: MakeRun) -> None:
    gpu = make_run(eval=SECTION, cluster__instance_type="p5.48xlarge", parallelism={"tensor_parallel": 1})
    assert gpu.plan["eval"].resources.exclusive and not gpu.plan["tasks"].resources.exclusive
    trainium = {"cluster__instance_type": "trn2.48xlarge", "parallelism": {"tensor_parallel": 4}}
    assert not make_run(eval=SECTION, **trainium).plan["eval"].resources.exclusive
    neuron = trainium | {"engine": "neuron", "training": {"precision": "fp32"}}
    with pytest.raises(UserError, match=r"eval: .*engine neuron; set eval\.python"):
        make_run(eval=SECTION, **neuron)
    assert "eval" in make_run(eval=SECTION | {"python": "/opt/eval/bin/python"}, **neuron).plan


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        ({"eval": {"tasks": []}}, r"eval\.tasks: "),
        ({"eval": {"tasks": ["a", "a"]}}, r"eval\.tasks: a is listed twice"),
        ({"eval": {"tasks": ["mmlu_*"]}}, r"eval\.tasks.*name of one task"),
        ({"eval": SECTION | {"batch_size": "most"}}, r"eval\.batch_size"),
        ({"eval": SECTION | {"include_path": "absent"}}, r"eval\.include_path: no such file or directory"),
        ({"eval": SECTION | {"include_path": "file"}}, r"eval\.include_path: .*file is not a directory"),
        ({"eval": SECTION | {"include_revision": "local-0"}}, r"eval\.include_revision: .*without include_path"),
        (
            {"eval": SECTION, "sagemaker": TRAINING_JOBS},
            r"eval: SageMaker training jobs do not evaluate",
        ),
    ],
)
def test_sections_that_are_refused(make_run: MakeRun, tmp_path: Path, overrides: dict[str, Any], error: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=error):
        make_run(**overrides)


def test_only_stage_tasks_uses_the_network(make_run: MakeRun) -> None:
    run = make_run(eval=SECTION)
    scripts = render(run, Installation(Path("/kit/python"), Path("/kit/code")))
    assert "HF_HUB_OFFLINE=1" in scripts["eval"] and "unset HF_TOKEN" in scripts["eval"]
    assert "HF_HUB_OFFLINE" not in scripts["tasks"] and "python=/kit/python" in scripts["tasks"]
    assert f"python={run.paths.evaluation_environment}/bin/python" in scripts["eval"]
    assert (
        "python=/opt/e"
        in render(make_run(eval=SECTION | {"python": "/opt/e"}), Installation(Path("/p"), Path("/c")))["eval"]
    )


def test_a_finished_run_gets_an_evaluation_of_its_own(make_run: MakeRun, tmp_path: Path) -> None:
    run = finished(make_run)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "quiz.yaml").write_text("task: quiz\n")
    evaluated = with_evaluation(run, {"tasks": ("quiz",), "include_path": "own"}, tmp_path)
    assert evaluated.paths.directory == run.paths.directory and chosen(evaluated, only="eval") == ["tasks", "eval"]
    assert evaluated.config.eval is not None and evaluated.config.eval.include_path == str(tmp_path / "own")
    assert run_file.resolve(evaluated.config, tmp_path) == evaluated.config
    # what is not done besides is not this command's business
    run.paths.record_path("generate").unlink()
    assert chosen(evaluated, only="eval") == ["tasks", "eval"]
    finish(evaluated, "tasks")
    assert chosen(evaluated, only="eval") == ["eval"] and chosen(evaluated) == ["generate", "eval"]
    with pytest.raises(UserError, match=r"^hyperpod-ft eval: eval\.tasks\.0: must be the name of one task"):
        with_evaluation(run, {"tasks": ("a b",)}, tmp_path)
    run.paths.record_path("merge").unlink()
    with pytest.raises(UserError, match=r"no tuned model yet: stage merge: has not run; run: hyperpod-ft resume"):
        with_evaluation(run, {"tasks": ("quiz",)}, tmp_path)


class Recorder(ProcessLauncher):
    """Takes the stages instead of starting them."""

    def submit(self, run: Run, stages: Any, after: object) -> None:
        for number, stage in enumerate(stages):
            run.journal.add_job(Job(stage.name, f"p{number}", self.name, "2026-01-01T00:00:00Z"))


def test_the_command_submits_its_own_stages(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = finished(make_run, eval={"tasks": ["mmlu"], "limit": 5})
    monkeypatch.setattr(launchers, "ProcessLauncher", Recorder)
    options = ["--tasks", "arc_easy, gsm8k", "--num-fewshot", "0", "--batch-size", "auto", "--launcher", "process"]
    done = CliRunner().invoke(app, ["eval", str(run.paths.directory), *options], catch_exceptions=False)
    assert done.exit_code == 0 and "tasks p0, eval p1" in done.output, done.output
    section = Run.open(run.paths.directory).config.eval
    assert section is not None and section.tasks == ("arc_easy", "gsm8k")
    assert (section.num_fewshot, section.limit, section.batch_size) == (0, None, "auto")


def test_force_evaluates_again(make_run: MakeRun) -> None:
    run = finished(make_run, eval=SECTION)
    for stage in ("tasks", "eval"):
        finish(run, stage)
    for file in (
        run.paths.base_scores / "1.json",
        run.paths.tuned_scores / "1.json",
        run.paths.base_scores / "of-another-run.json",
    ):
        publish.write_text(file, "{}")
    submit(run, Launchers((Recorder(),)), Selection(only="eval", force=True), "process")
    assert run.paths.evaluation_forced.exists(), "for the stage, which knows what of the base model's scores is meant"
    assert sorted(file.name for file in run.paths.base_scores.iterdir()) == ["1.json", "of-another-run.json"]
    assert not run.paths.tuned_scores.exists()
    assert len(list((run.paths.directory / "evaluations").glob("*.discarded-*"))) == 1
    assert not run.paths.record_path("eval").exists()


def test_a_card_may_be_edited(make_run: MakeRun) -> None:
    run = finished(make_run)
    run.paths.tuned_model.mkdir()
    files = run.paths.tuned_model / "README.md", run.paths.tuned_model / "config.json"
    for file in files:
        file.write_text("x")
    record = run.journal.record("merge")
    assert record is not None
    record.__class__(**vars(record) | {"outputs": outputs_of(run.paths.root, [run.paths.tuned_model])}).write(
        run.paths.record_path("merge")
    )
    files[0].write_text("another card")
    assert run.journal.is_done("merge")
    files[1].write_text("{}")
    assert "config.json has 2 bytes" in run.journal.why_not_done("merge")
