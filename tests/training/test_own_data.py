"""docs/your-own-data.md, followed to the letter: its rows, its YAML and its commands; stages as functions."""

import json
from pathlib import Path

import pytest
import yaml

from hyperpod_ft.config.run_file import load
from hyperpod_ft.runs.run import Run
from tests.pages.blocks import blocks
from tests.training.conftest import Jobs, kit
from tests.training.every_stage import perform

PAGE = "docs/your-own-data.md"
STEPS = 3
CAPITALS = """France Paris, Italy Rome, Spain Madrid, Portugal Lisbon, Austria Vienna, Germany Berlin, Norway Oslo,
Sweden Stockholm, Denmark Copenhagen, Finland Helsinki, Poland Warsaw, Hungary Budapest, Greece Athens, Japan Tokyo,
China Beijing, India Delhi, Egypt Cairo, Kenya Nairobi, Peru Lima, Chile Santiago, Cuba Havana, Canada Ottawa"""

pytestmark = [pytest.mark.training, pytest.mark.timeout(600)]


def test_the_page_trains_a_newcomers_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], jobs: Jobs
) -> None:
    monkeypatch.chdir(tmp_path)
    rows, _ = blocks(PAGE, "json")  # test_learning_to_call.py trains the conversation
    capitals = [pair.split() for pair in CAPITALS.split(",")]
    own = [json.dumps({"question": f"What is the capital of {land}?", "answer": city}) for land, city in capitals]
    (tmp_path / "questions.jsonl").write_text("\n".join([rows.strip(), *own, ""]), encoding="utf-8")
    kit("init", "--model", "example:tiny-llama", "--dataset", "./questions.jsonl", "--instance", "local")
    run_file = tmp_path / "run.yaml"
    sections, _several, pattern = map(yaml.safe_load, blocks(PAGE, "yaml"))
    values = yaml.safe_load(run_file.read_text(encoding="utf-8"))
    templates = ("source", "format", "prompt_template", "completion_template")
    assert [values["dataset"][key] for key in templates] == [sections["dataset"][key] for key in templates]
    values["dataset"] |= sections["dataset"] | {"max_length": 512, "validation_share": 0.2}  # of few rows
    values["generate"] |= pattern["generate"]
    run_file.write_text(yaml.safe_dump(values), encoding="utf-8")
    assert "+ completion" in kit("data", "show", "run.yaml", "--row", "3")
    steps = f"training.max_steps={STEPS}"
    capfd.readouterr()
    run = perform(Run.of(load(run_file, [steps])), jobs.train)
    printed = capfd.readouterr().out
    assert "merged" in printed
    assert str(len(own) + len(rows.splitlines())) in printed, "the rows that the dataset stage read"
    trained = run.journal.record("train").facts  # type: ignore[union-attr]
    assert trained["steps"] == STEPS and trained["final_loss"] < trained["first_loss"]
    samples = json.loads(run.paths.samples_path.read_text(encoding="utf-8"))
    assert json.loads(rows.splitlines()[0])["question"] in samples["prompts"][0]["prompt"], (
        "init writes the first row's"
    )
    assert "Nothing to submit" in kit("submit", "run.yaml", "--launcher", "process", "--set", steps)
    assert json.loads(kit("status", str(run.paths.directory), "--json"))["state"] == "done"
