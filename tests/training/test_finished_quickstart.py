"""All stages of the quickstart, and what follows: preferences on its model (docs/methods.md), the chain of digests."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hyperpod_ft import publish
from hyperpod_ft.cli.main import app
from hyperpod_ft.config import run_file
from hyperpod_ft.engines.batches import PreferenceSplit
from hyperpod_ft.runs.records import outputs_of
from hyperpod_ft.runs.run import Run
from tests.training.conftest import Jobs, kit, metrics
from tests.training.every_stage import perform

pytestmark = [pytest.mark.training, pytest.mark.timeout(600)]

ONE_RANK = ["cluster.nodes=1", "parallelism.tensor_parallel=1", "parallelism.ranks_per_node=1"]
SHORT_ANSWERS = ["generate.train_samples=2", "generate.validation_samples=2", "generate.max_new_tokens=4"]


def recipe(name: str, root: Path, *changes: str) -> Run:
    overrides = [f"cluster.root={root}", "training.max_steps=3", *changes]
    return Run.of(run_file.load(run_file.find(name), overrides))


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("quickstart") / "root"
    return perform(recipe("quickstart", root, *ONE_RANK, *SHORT_ANSWERS, "training.save_every_steps=2"))


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


def flip(file: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def verified(run: Run) -> tuple[int, list[str]]:
    done = CliRunner().invoke(app, ["verify", str(run.paths.directory), "--run"])
    return done.exit_code, done.stdout.splitlines()


def test_each_link_from_the_data_to_the_endpoint_is_checked(quickstart: Run) -> None:
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
    for link, (file, changed) in changes.items():
        content = file.read_text()
        file.write_text(changed)
        status, lines = verified(quickstart)
        assert status == 1 and lines[-1].startswith(f"wrong: {link}: {file}: "), lines
        file.write_text(content)
    paths.endpoint_proof.unlink()


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
    weights = paths.tuned_model / "model.safetensors"
    weights.rename(aside)
    status, lines = verified(quickstart)
    assert status == 1 and lines[-1].startswith(f"wrong: merge: {weights}: is missing; restore it")
    aside.rename(weights)
    samples = paths.record_path("generate")
    samples.rename(aside)
    assert verified(quickstart)[1][-1] == "generate     has not run"
    aside.rename(samples)
