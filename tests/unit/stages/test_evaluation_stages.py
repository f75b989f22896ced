"""Stages tasks and eval: what they ask lm-evaluation-harness, what survives a kill, and what they leave."""

import json
import math
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hyperpod_ft.environments import interpreters
from hyperpod_ft.errors import UserError
from hyperpod_ft.evaluation import harness, harness_process
from hyperpod_ft.runs.results.evaluation import evaluations
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages import eval as eval_stage
from hyperpod_ft.stages import stage, tasks
from tests import lm_eval_interpreters
from tests.conftest import MakeRun
from tests.unit.stage_runs import finish

HARNESS = {"lm_eval": "0.4.13"}
TASKS = Path(__file__).resolve().parents[2] / "data" / "lm-eval"
TINY_LLAMA = TASKS.parents[2] / "examples" / "quickstart" / "tiny-llama"
CARD = "---\nlicense: mit\n---\n\n# mine\n"


@pytest.fixture
def in_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness's program is called, which takes a hundredth of the time that starting it does."""

    def call(command: list[str], *, cwd: Path, env: dict[str, str]) -> int:
        monkeypatch.chdir(cwd)
        harness.main(command[3:])
        return 0

    monkeypatch.setattr(subprocess, "call", call)
    monkeypatch.setattr(tasks, "probe", lambda *_: {"packages": dict.fromkeys(tasks._PACKAGES, "1") | HARNESS})
    monkeypatch.setenv("STAND_IN_LOG", str(tmp_path / "python" / "evaluated.jsonl"))


@pytest.fixture
def evaluated(tmp_path: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """A merged run whose section eval asks for tasks with these YAML files."""
    monkeypatch.syspath_prepend(str(lm_eval_interpreters.STAND_IN))  # where stage eval reads the harness's version

    def make(files: dict[str, dict[str, Any]], **section: Any) -> Run:
        own = tmp_path / "own"
        shutil.rmtree(own, ignore_errors=True)
        own.mkdir()
        for name, config in files.items():
            (own / f"{name}.yaml").write_text(yaml.safe_dump({"task": name} | config))
        python = lm_eval_interpreters.with_stand_in(tmp_path / "python")
        chosen = {"tasks": list(files), "include_path": str(own), "python": str(python)} | section
        run = make_run(eval=chosen)
        for model, accuracy in ((run.paths.base_model, 0.25), (run.paths.tuned_model, 0.75)):
            model.mkdir(parents=True, exist_ok=True)
            (model / "accuracy.txt").write_text(str(accuracy))
        (run.paths.tuned_model / "README.md").write_text(CARD)
        for name in ("env", "download", "consolidate", "merge"):
            finish(run, name)
        run.freeze()
        return run

    return make


def asked(tmp_path: Path) -> list[dict[str, Any]]:
    lines = (tmp_path / "python" / "evaluated.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def perform(run: Run) -> None:
    stage.perform(run, "tasks", tasks.work)
    stage.perform(run, "eval", eval_stage.work)


def test_both_models_are_evaluated_under_the_same_conditions(evaluated: Callable[..., Run], tmp_path: Path) -> None:
    run = evaluated({"quiz": {}, "pair": {"members": ["a", "b"]}}, num_fewshot=2, limit=16, batch_size=4)
    perform(run)
    base, tuned = asked(tmp_path)[:2], asked(tmp_path)[2:]
    assert [(row["model"], row["task"]) for row in tuned] == [("merged", "quiz"), ("merged", "pair")]
    assert [row["settings"] for row in base] == [row["settings"] for row in tuned]
    for one, other in zip(base, tuned, strict=True):
        assert one["arguments"] | {"pretrained": ""} == other["arguments"] | {"pretrained": ""}
    settings = base[0]["settings"]
    assert (settings["num_fewshot"], settings["limit"], settings["batch_size"]) == (2, 16, 4)
    assert settings["confirm_run_unsafe_code"] is False
    assert base[0]["arguments"]["tokenizer"] == str(run.paths.tuned_model) and base[0]["directory"] == str(
        run.paths.own_tasks
    )
    (found,) = evaluations(run)
    assert [one.metric.task for one in found.scores] == ["quiz", "pair", "a", "b"]
    assert [one.metric.task for one in found.main_scores] == ["quiz", "pair"]
    quiz = found.scores[0]
    assert (quiz.base.value, quiz.tuned.value, quiz.tuned.stderr) == (0.25, 0.75, pytest.approx(0.10825, abs=1e-5))
    assert found.label(quiz.metric) == "quiz, acc (2-shot, first 16)" and found.versions["lm_eval"] == "0.4.13"
    record = run.journal.record("eval")
    assert record is not None and record.facts["scores"][0]["metric"]["samples"] == 16
    card = (run.paths.tuned_model / "README.md").read_text()
    assert card.startswith(CARD) and "| quiz, acc (2-shot, first 16) | 0.2500 ± 0.1083 | 0.7500 ± 0.1083 |" in card
    assert "lm-evaluation-harness 0.4.13" in card and run.journal.is_done("merge")


def test_a_killed_evaluation_repeats_only_its_task(evaluated: Callable[..., Run], tmp_path: Path) -> None:
    run = evaluated({"one": {}, "two": {"kills": "merged"}})
    with pytest.raises(UserError, match=r"ended with signal 9; .*finished tasks are kept"):
        perform(run)
    assert not run.paths.record_path("eval").exists()
    stage.perform(run, "eval", eval_stage.work)
    done = [(row["model"] == "merged", row["task"]) for row in asked(tmp_path)]
    assert done == [(False, "one"), (False, "two"), (True, "one"), (True, "two"), (True, "two")]


@pytest.mark.usefixtures("in_process")
def test_a_task_that_fails_is_named_and_the_others_are_kept(evaluated: Callable[..., Run], tmp_path: Path) -> None:
    run = evaluated({"bad": {"fails": "no such column. More words."}, "good": {}})
    with pytest.raises(UserError, match=r"base model: 1 of 2 tasks failed: bad: RuntimeError: no such column;"):
        perform(run)
    assert [row["task"] for row in asked(tmp_path)] == ["bad", "good"], "the tuned model needs not be asked"
    other = evaluated({"bad": {"fails": "again"}, "good": {}}, tasks=["good"])
    assert other.paths.own_tasks != run.paths.own_tasks, "edited tasks are others"
    perform(other)
    assert [one.metric.task for one in evaluations(other)[0].scores] == ["good"]


@pytest.mark.usefixtures("in_process")
def test_a_forced_evaluation_repeats_the_base_models_own_tasks(evaluated: Callable[..., Run], tmp_path: Path) -> None:
    files: dict[str, dict[str, Any]] = {"mine": {}, "another-runs": {}}
    perform(evaluated(files))
    run = evaluated(files, tasks=["mine"])
    perform(run)
    assert len(asked(tmp_path)) == 4, "both models' scores on both tasks were there"
    run.paths.record_path("eval").unlink()
    run.paths.evaluation_forced.touch()
    perform(run)
    assert [row["task"] for row in asked(tmp_path)[4:]] == ["mine"], "of the base model: the tuned one's were not moved"
    (file,) = run.paths.base_scores.glob("*.json")
    assert json.loads(file.read_text())["tasks"].keys() == {"mine", "another-runs"}
    assert not run.paths.evaluation_forced.exists()


@pytest.mark.usefixtures("in_process")
def test_scores_of_other_versions_or_settings_are_not_used_again(
    evaluated: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = evaluated({"quiz": {}})
    perform(run)
    run.paths.record_path("eval").unlink()
    perform(run)
    assert len(asked(tmp_path)) == 2, "both models' scores were there"
    run.paths.record_path("eval").unlink()
    monkeypatch.setattr(stage, "versions", lambda: {"torch": "9.9"})
    perform(run)
    assert len(asked(tmp_path)) == 4
    limited = evaluated({"quiz": {}}, limit=3)
    perform(limited)
    assert len(asked(tmp_path)) == 6
    assert [one.limit for one in evaluations(limited)] == [None, 3], "the run keeps every evaluation of its model"


@pytest.mark.usefixtures("in_process")
def test_the_base_models_scores_are_shared(evaluated: Callable[..., Run], tmp_path: Path, make_run: MakeRun) -> None:
    run = evaluated({"quiz": {}})
    perform(run)
    assert run.config.eval is not None
    other = make_run(eval=run.config.eval.model_dump(), seed=7)
    shutil.copytree(run.paths.tuned_model, other.paths.tuned_model)
    for name in ("consolidate", "merge"):
        finish(other, name)
    perform(other)
    assert other.paths.directory != run.paths.directory and len(asked(tmp_path)) == 3
    merged_again = make_run(merge__dtype="float32")
    assert merged_again.paths.directory == run.paths.directory and evaluations(run) and not evaluations(merged_again)


@pytest.mark.usefixtures("in_process")
def test_tasks_are_checked_before_the_training(evaluated: Callable[..., Run]) -> None:
    files = {"good": {}, "code": {"unsafe_code": True}, "group": {"unsafe_member": True}, "lost": {"damaged": "x.py"}}
    run = evaluated(files, tasks=["good", "goood", "code", "group", "lost"])
    stages = run.plan.stages
    assert "tasks" not in run.plan["train"].needs
    assert stages.index(run.plan["tasks"]) < stages.index(run.plan["train"])
    with pytest.raises(UserError) as error:
        stage.perform(run, "tasks", tasks.work)
    unknown, code, group, lost = str(error.value).splitlines()
    assert "eval.tasks: goood: " in unknown and "did you mean good?" in unknown
    assert code.startswith("eval.tasks: code: runs code") and "eval.allow_code_execution" in code
    assert group.startswith("eval.tasks: group: group runs code") and "lost: cannot be loaded: FileNotFound" in lost
    allowed = evaluated(files, tasks=["code", "group"], allow_code_execution=True)
    stage.perform(allowed, "tasks", tasks.work)


@pytest.mark.usefixtures("in_process")
def test_tasks_that_changed_since_the_submission_are_refused(evaluated: Callable[..., Run]) -> None:
    run = evaluated({"quiz": {}})
    assert run.config.eval is not None and run.config.eval.include_path is not None
    Path(run.config.eval.include_path, "quiz.yaml").write_text("task: quiz\nlimit: 3\n")
    with pytest.raises(UserError, match=r"eval\.include_path: .* is local-\w+, not local-"):
        stage.perform(run, "tasks", tasks.work)


def test_the_users_token_and_the_offline_rule_reach_the_harness(
    evaluated: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = evaluated({"quiz": {}})
    monkeypatch.setenv("HF_HOME", "/home/user/hf")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    variables = harness_process._variables(run.paths, allow_code=False)
    assert variables["HF_HOME"] == str(run.paths.evaluation_hub) and variables["HF_TOKEN_PATH"] == "/home/user/hf/token"
    assert variables["HF_HUB_OFFLINE"] == "1" and "HF_ALLOW_CODE_EVAL" not in variables
    assert harness_process._variables(run.paths, allow_code=True)["HF_ALLOW_CODE_EVAL"] == "1"


def test_another_version_of_the_harness_is_refused() -> None:
    for version in ("0.4.9", "0.5.0", "none"):
        with pytest.raises(UserError, match=f"has lm-evaluation-harness {version}, and this kit needs 0.4.13"):
            tasks._check_version(version)
    for version in ("0.4.13", "0.4.14"):
        tasks._check_version(version)


def test_the_environment_is_the_runs_with_more_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What finds the packages of an environment that was itself made on top of another."""
    below = tmp_path / "below"
    below.mkdir()
    site_packages = tmp_path / "environment" / "lib" / "python3.11" / "site-packages"
    monkeypatch.setattr(interpreters, "_create", lambda _: site_packages.mkdir(parents=True))
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ncase $2 in *ensurepip*) echo 3.11;; *) echo {below};; esac\n")
    python.chmod(0o755)
    interpreters.create_on_top_of(python, tmp_path / "environment")
    assert (site_packages / "base.pth").read_text() == f"import site; site.addsitedir({str(below)!r})\n"


@pytest.mark.lm_eval
def test_the_real_harness_gives_the_scores_of_the_models(tmp_path: Path, make_run: MakeRun) -> None:
    """Its accuracy and standard error are those of likelihoods computed here, for both models."""
    own = tmp_path / "own"
    shutil.copytree(TASKS, own)
    python = str(lm_eval_interpreters.real())
    run = make_run(eval={"tasks": ["pair"], "include_path": str(own), "python": python, "batch_size": 3})
    shutil.copytree(TINY_LLAMA, run.paths.base_model)
    shutil.copytree(TINY_LLAMA, run.paths.tuned_model)
    weights = load_file(run.paths.tuned_model / "model.safetensors")
    weights = {name: value * (1.5 if "q_proj" in name else 1) for name, value in weights.items()}
    save_file(weights, run.paths.tuned_model / "model.safetensors", {"format": "pt"})
    for name in ("env", "download", "consolidate", "merge"):
        finish(run, name)
    run.freeze()
    perform(run)
    (found,) = evaluations(run)
    first, second, *_ = found.scores
    assert [one.metric.task for one in found.main_scores] == ["quiz", "quiz_write", "pair"]
    assert (first.metric.name, first.metric.samples, first.metric.part_of) == ("acc", 8, "pair")
    rows = [json.loads(line) for line in (TASKS / "quiz.jsonl").read_text().splitlines()]
    for directory, score in ((run.paths.base_model, first.base), (run.paths.tuned_model, first.tuned)):
        right = [best_choice(directory, row["question"], row["choices"]) == row["answer"] for row in rows]
        mean = sum(right) / len(right)
        assert score.value == pytest.approx(mean)
        assert score.stderr == pytest.approx(math.sqrt(mean * (1 - mean) / (len(right) - 1)))
    recorded = json.loads((TASKS / "results.json").read_text())["pair"]["results"]["quiz"]
    assert (first.base.value, second.base.value) == (recorded["acc,none"], recorded["acc_norm,none"])
    unsafe = harness.TasksRequest(("humaneval", "quizz"), str(own), False)
    problems = harness_process.look_up(run.paths, unsafe).problems
    assert "runs code" in problems["humaneval"] and "did you mean quiz?" in problems["quizz"]


def best_choice(directory: Path, question: str, choices: list[str]) -> int:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    prompt = f"Question: {question}\nAnswer:"
    begin, likelihoods = len(tokenizer(prompt).input_ids), []
    for choice in choices:
        ids = torch.tensor([tokenizer(f"{prompt} {choice}").input_ids])
        with torch.inference_mode():
            predicted = model(ids).logits[0, begin - 1 : -1].log_softmax(-1)
        likelihoods.append(float(predicted.gather(1, ids[0, begin:, None]).sum()))
    return likelihoods.index(max(likelihoods))


def test_tasks_that_another_run_may_be_reading_are_not_replaced(evaluated: Callable[..., Run]) -> None:
    run = evaluated({"quiz": {}})
    stage.perform(run, "tasks", tasks.work)
    assert run.paths.own_tasks is not None
    file = run.paths.own_tasks / "quiz.yaml"
    copied = file.stat().st_ino
    stage.perform(run, "tasks", tasks.work)
    run.paths.record_path("tasks").unlink()
    stage.perform(run, "tasks", tasks.work)
    assert file.stat().st_ino == copied
    run.paths.record_path("tasks").unlink()
    file.write_text("damaged")
    stage.perform(run, "tasks", tasks.work)
    assert "quiz" in file.read_text()
