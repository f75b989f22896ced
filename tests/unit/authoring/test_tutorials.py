"""The run files of docs/gpus.md and docs/trainium.md are those that `init` writes, and fit their instances."""

import json
from pathlib import Path

import pytest
import yaml

from hyperpod_ft.authoring.new_run import NewRun, new_run
from hyperpod_ft.config import run_file
from scripts.memory_table import QWEN3_8B
from tests.pages.blocks import blocks


@pytest.mark.parametrize(
    ("page", "instance"),
    [("docs/gpus.md", "p5.48xlarge"), ("docs/trainium.md", "trn1.32xlarge"), ("docs/trainium.md", "trn2.48xlarge")],
)
def test_the_run_file_is_that_of_init(tmp_path: Path, page: str, instance: str) -> None:
    (tmp_path / "qwen").mkdir()
    (tmp_path / "qwen" / "config.json").write_text(json.dumps(QWEN3_8B))
    row = json.dumps({"question": "How many clips are 2 and 2?", "answer": "2 and 2 are 4.\n#### 4"}) + "\n"
    (tmp_path / "questions.jsonl").write_text(row * 7473)
    wanted = NewRun(str(tmp_path / "qwen"), str(tmp_path / "questions.jsonl"), instance)
    written = new_run(wanted, tmp_path / "run.yaml").values
    (text,) = blocks(page, "yaml")
    shown = yaml.safe_load(text)
    run_file.validate(shown, "run.yaml")
    assert shown.pop("model") == {"source": "Qwen/Qwen3-8B"}
    assert "answer_pattern" in shown.pop("generate")
    written = {name: value for name, value in written.items() if name not in ("model", "generate")}
    if instance.startswith("trn2"):
        assert written["engine"] == "torch" and written["env"] == shown["env"]
        return
    assert shown == {**written, "name": "qwen3-8b-questions-lora"}
