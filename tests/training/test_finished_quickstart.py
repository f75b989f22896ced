"""All stages of the quickstart, and what follows: preferences on its model (docs/methods.md), the chain of digests."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from hyperpod_ft import publish
from hyperpod_ft.cli.main import app
from hyperpod_ft.config import run_file
from hyperpod_ft.engines.batches import DataOrder, PreferenceSplit
from hyperpod_ft.launch.elsewhere import elsewhere
from hyperpod_ft.replay import __main__ as replay
from hyperpod_ft.runs.jobs import PYTHON, Job
from hyperpod_ft.runs.records import outputs_of, unix_time, utc_now
from hyperpod_ft.runs.results import usage
from hyperpod_ft.runs.run import Run
from tests.training.conftest import Jobs, kit, metrics, process_group_of_its_own, train_here
from tests.training.every_stage import perform
from tests.unit.stage_runs import finish, tree

pytestmark = [pytest.mark.training, pytest.mark.timeout(600)]

ONE_RANK = ["cluster.nodes=1", "parallelism.tensor_parallel=1", "parallelism.ranks_per_node=1"]
SHORT_ANSWERS = ["generate.train_samples=2", "generate.validation_samples=2", "generate.max_new_tokens=4"]


def recipe(name: str, root: Path, *changes: str) -> Run:
    overrides = [f"cluster.root={root}", "training.max_steps=3", *changes]
    return Run.of(run_file.load(run_file.find(name), overrides))


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Run:
    def train(run: Run) -> None:
        with usage.recording_usage(run):
            train_here(run)

    root = tmp_path_factory.mktemp("quickstart") / "root"
    return perform(recipe("quickstart", root, *ONE_RANK, *SHORT_ANSWERS, "training.save_every_steps=2"), train)


def test_preferences_on_a_fine_tuned_model(quickstart: Run, jobs: Jobs) -> None:
    root, base = quickstart.paths.root, quickstart.paths.tuned_model
    run = recipe("quickstart-dpo", root, f"model.source={base}", "training.learning_rate=1.0e-2", *SHORT_ANSWERS)
    assert {"quickstart", "quickstart-dpo"} <= set(run_file.recipes())
    perform(run, jobs.train)
    facts = run.journal.record("train").facts  # type: ignore[union-attr]
    assert facts["data_parallel"] == 2 and facts["final_loss"] < facts["first_loss"] == pytest.approx(0.6931, abs=1e-4)
    assert facts["validation_rewards/accuracies"] > 0.9
    assert [row["rewards/margins"] > 0 for row in metrics(run)] == [False, True, True]
    split = PreferenceSplit(run.paths.dataset_path / "train")
    assert split.documents == 2 * json.loads((run.paths.dataset_path / "report.json").read_text())["train_examples"]
    card = (run.paths.tuned_model / "README.md").read_text(encoding="utf-8")
    assert "- dpo\n" in card and "direct preference optimization, beta 0.1" in card
    compared = kit("compare", str(run.paths.directory))
    assert "validation rewards/accuracies" in compared and "100.0%" in compared
    status, lines = replayed(run, 2)
    assert status == 0 and "since 2 ranks have added in another order" in lines[1]
    assert lines[2].startswith("loss ") and lines[4].endswith(": equal")


@pytest.fixture(autouse=True)
def _replays_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """`replay` in this process, which has imported what its program imports."""

    def become(program: Path, command: list[str], environment: dict[str, str]) -> None:
        assert command[:3] == [str(program), "-m", "hyperpod_ft.replay"] and environment["OMP_NUM_THREADS"] == "1"
        with monkeypatch.context() as patched, process_group_of_its_own():
            patched.setattr(sys, "argv", command[2:])
            replay.main()

    monkeypatch.setattr("os.execve", become)
    monkeypatch.setenv(PYTHON, sys.executable)  # whose code is here: none is copied
    monkeypatch.chdir("/")


def replayed(run: Run, step: int) -> tuple[int, list[str]]:
    """Exit code and lines of `replay`, which must leave all files as they are."""
    before = tree(run.paths.root)
    done = CliRunner().invoke(app, ["replay", str(run.paths.directory), "--step", str(step)])
    assert tree(run.paths.root) == before
    return done.exit_code, done.output.splitlines()


def flip(file: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def verified(run: Run, reference: Path | None = None) -> tuple[int, list[str]]:
    done = CliRunner().invoke(app, ["verify", str(reference or run.paths.directory), "--run"])
    return done.exit_code, done.stdout.splitlines()


def test_each_link_from_the_data_to_the_endpoint_is_checked(quickstart: Run, tmp_path: Path) -> None:
    paths, stages = quickstart.paths, ["download", "dataset", "train", "consolidate", "merge", "generate"]
    publish.write_json(paths.endpoint_proof, {"model": quickstart.journal.record("merge").digest})  # type: ignore[union-attr]
    status, lines = verified(quickstart)
    assert status == 0 and [line.split()[0] for line in lines] == ["settings", *stages, "endpoint"]
    assert all(line.endswith("as recorded") for line in lines)
    assert json.loads(kit("verify", str(paths.directory), "--run", "--json"))["ok"]
    links = [
        ("download", *paths.raw_datasets[0].glob("*.jsonl")),
        ("download", paths.base_model / "model.safetensors"),
        ("dataset", paths.dataset_path / "train" / "labels.npy"),
        ("train", paths.checkpoint(3) / "__0_0.distcp"),
        ("train", paths.checkpoint(3) / "checkpoint.json"),
        ("train", paths.metrics_path),
        ("consolidate", paths.adapter / "adapter_model.safetensors"),
        ("merge", paths.tuned_model / "model.safetensors"),
        ("generate", paths.samples_path),
    ]
    for link, file in links:
        flip(file)
        status, lines = verified(quickstart)
        assert status == 1 and len(lines) == 2 + stages.index(link), link
        assert lines[-1].startswith(
            f"wrong: {link}: {file}: differs from what stage {link} left; restore it, or remove"
        )
        assert f"--from {link} --force" in lines[-1]
        flip(file)
    changes = {
        "settings": (
            paths.config_path,
            paths.config_path.read_text().replace("learning_rate: 0.008", "learning_rate: 9"),
        ),
        "endpoint": (paths.endpoint_proof, '{"model": "another"}'),
    }
    run_file = shutil.copy(paths.config_path, tmp_path / "mine.yaml")
    quickstart.journal.add_job(Job("env", "p1", "process", utc_now()))
    for link, (file, changed) in changes.items():
        content = file.read_text()
        file.write_text(changed)
        for reference in (paths.directory, run_file):
            status, lines = verified(quickstart, reference)
            assert status == 1 and lines[-1].startswith(f"wrong: {link}: {file}: "), lines
        file.write_text(content)
    paths.endpoint_proof.unlink()
    paths.jobs_path.unlink()


def test_what_a_stage_had_read_is_checked(quickstart: Run) -> None:
    """After another `--only dataset --force`, the rows fit their record, but are not those of the training."""
    root = quickstart.paths.root
    for stage, reader in {
        "download": "dataset",
        "dataset": "train",
        "train": "consolidate",
        "merge": "generate",
    }.items():
        path, record = quickstart.paths.record_path(stage), quickstart.journal.record(stage)
        assert record is not None
        files = [root / output.path for output in record.outputs]
        made, content = next(file for file in files if file.suffix != ".md"), path.read_text()
        flip(made)
        replace(record, outputs=outputs_of(root, files)).write(path)
        status, lines = verified(quickstart)
        assert status == 1
        assert lines[-1].startswith(f"wrong: {reader}: {path}: is not of what stage {reader} has read; run: "), lines
        flip(made)
        path.write_text(content)


def test_what_is_removed_or_missing(quickstart: Run) -> None:
    paths = quickstart.paths
    aside = paths.checkpoints.with_name("aside")
    paths.checkpoints.rename(aside)  # as `clean` leaves a run
    card = paths.tuned_model / "README.md"
    card.write_text(card.read_text() + "my notes")
    status, lines = verified(quickstart)
    assert status == 0 and lines[3] == "train        1 file as recorded, 3 files removed since"
    aside.rename(paths.checkpoints)
    weights, split = paths.tuned_model / "model.safetensors", paths.dataset_path / "train"
    for link, missing in {"merge": weights, "dataset": split, "generate": paths.samples_path}.items():
        missing.rename(aside)
        status, lines = verified(quickstart)
        assert status == 1 and lines[-1].startswith(f"wrong: {link}: {missing}")
        assert ": is missing; restore it" in lines[-1]
        aside.rename(missing)
    for whole in (paths.dataset_path, paths.checkpoint(3), paths.raw_datasets[0], paths.adapter):
        whole.rename(aside)
        assert verified(quickstart)[0] == 0
        aside.rename(whole)
    samples = paths.record_path("generate")
    samples.rename(aside)
    assert verified(quickstart)[1][-1] == "generate     has not run"
    aside.rename(samples)


def test_a_step_again(quickstart: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = quickstart.paths
    for step, begun in {1: "the base model", 2: "the base model", 3: "the checkpoint of step 2"}.items():
        status, lines = replayed(quickstart, step)
        assert status == 0 and f"step {step} of {paths.full_name}, from {begun}, by one process on cpu" == lines[0]
        assert lines[1] == "expected: the same bits, since one rank, on this host, with the same packages"
        assert all(line.endswith(": equal") for line in lines[2:5])
        assert lines[5].endswith("no checkpoint was kept after this step" if step == 1 else ": equal")
    settings, planned = paths.config_path.read_text(), paths.plan_path.read_text()
    elsewhere(quickstart, ["parallelism.ranks_per_node=2", "training.micro_batch_size=1"]).freeze()
    assert replayed(quickstart, 3) == (0, lines), "as where the run was then"
    paths.config_path.write_text(settings)
    paths.plan_path.write_text(planned)
    (attempt,) = paths.usage_path.iterdir()
    written = attempt.read_text()
    publish.write_json(attempt, json.loads(written) | {"host": "another"})
    status, lines = replayed(quickstart, 3)
    assert status == 0 and lines[1] == "expected: within rounding, since the run computed on host another"
    attempt.write_text(written)
    status, lines = replayed(quickstart, 4)
    assert status == 2 and lines[-1].endswith("metrics.jsonl; the nearest that is: --step 3")
    monkeypatch.delattr(replay, "replay")
    assert replayed(quickstart, 3) == (1, []), "a crash is no other figure"


def test_a_step_with_other_rows_or_settings_is_told(quickstart: Run) -> None:
    paths = quickstart.paths
    rows = np.load(paths.dataset_path / "train" / "labels.npy", mmap_mode="r+")
    order = DataOrder(len(rows), quickstart.config.seed, 2, 1, 1)
    row = order.step(3)[0]
    label = int(np.flatnonzero(rows[row] >= 0)[-1])
    rows[row, label] += 1
    rows.flush()
    assert replayed(quickstart, 2)[0] == 0, "another step"
    status, lines = replayed(quickstart, 3)
    assert status == 3 and lines[-1].startswith("wrong: loss, gradient norm, weights; ")
    assert lines[-1].endswith(f"verify {paths.directory} --run says whether a file has changed")
    rows[row, label] -= 1
    rows.flush()

    settings = paths.config_path.read_text()
    paths.config_path.write_text(settings.replace("learning_rate: 0.008", "learning_rate: 0.008001"))
    status, lines = replayed(quickstart, 3)
    assert status == 3 and lines[-1].startswith("wrong: learning rate, weights; ")
    paths.config_path.write_text(settings)


def test_the_program_of_a_step_has_this_code_and_no_secret(quickstart: Run, tmp_path: Path) -> None:
    """It becomes the command's process, with nothing of the working directory, or of what is beside the kit."""
    (tmp_path / "yaml.py").write_text("1 / 0")
    program = tmp_path / "python"
    seen = "import os, sys, yaml, hyperpod_ft as kit; print(os.getcwd(), os.getppid(), kit.__file__, *os.environ)"
    program.write_text(f"#!/bin/sh\n{sys.executable} -c '{seen}'\nexit 7\n")
    program.chmod(0o700)
    variables = {**os.environ, PYTHON: str(program), "HF_TOKEN": "secret"}
    command = [sys.executable, "-P", "-m", "hyperpod_ft", "replay", str(quickstart.paths.directory), "--step", "1"]
    with subprocess.Popen(command, env=variables, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        found = process.communicate(timeout=300)[0].split()
    assert process.returncode == 7 and found[:2] == ["/", str(process.pid)]
    assert Path(found[2]).is_relative_to(quickstart.paths.code_copies)
    assert {"PYTHONSAFEPATH", "PYTHONNOUSERSITE"} <= set(found) and "HF_TOKEN" not in found


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        (["engine=trl", *ONE_RANK], "engine: trl: only steps of engine torch can be computed again"),
        (ONE_RANK, "a step needs the base model and the rows: stage download: has not run"),
        (["lora.dropout=0.1"], "lora.dropout: dropout, whose masks one process draws only for a run of one rank"),
        # where it is now; its steps were four ranks'
        (["lora.dropout=0.1", *ONE_RANK], "lora.dropout: dropout, whose masks one process draws only for a run"),
    ],
)
def test_what_cannot_be_computed_again(quickstart: Run, tmp_path: Path, changes: list[str], refused: str) -> None:
    run = recipe("quickstart", tmp_path / "root", *changes)
    run.freeze()
    finish(run, "env")
    if "dropout" in refused:  # its ranks are four
        for stage in ("download", "dataset"):
            finish(run, stage)
        four = replace(usage.beginning(run), ranks=4)
        if "cluster.nodes=1" in changes:  # otherwise, no attempt is known
            publish.write_json(run.paths.usage_path / "1.json", asdict(four))
        row = {"step": 1, "time": unix_time(four.started) + 1.0}
        publish.write_text(run.paths.metrics_path, f"{json.dumps(row)}\n")
        run.paths.base_model.parent.mkdir(parents=True)
        run.paths.base_model.symlink_to(quickstart.paths.base_model)
    status, lines = replayed(run, 1)
    assert status == 2 and refused in lines[-1]
