"""The run files of docs/first-run.md are those that `init` writes, and fit their instances."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from hyperpod_ft.authoring.new_run import NewRun, new_run
from hyperpod_ft.config import run_file
from scripts.memory_table import QWEN3_8B
from tests.pages.blocks import blocks


def shown(instance: str) -> dict[str, Any]:
    """The page's run file; for Trainium, with what differs there."""
    values, trainium = map(yaml.safe_load, blocks("docs/first-run.md", "yaml"))
    if instance.startswith("trn1"):
        for section, keys in trainium.items():
            values[section] = values.get(section, {}) | keys if isinstance(keys, dict) else keys
    return dict(values)


@pytest.mark.parametrize("instance", ["p5.48xlarge", "trn1.32xlarge", "trn2.48xlarge"])
def test_the_run_file_is_that_of_init(tmp_path: Path, instance: str) -> None:
    (tmp_path / "qwen").mkdir()
    (tmp_path / "qwen" / "config.json").write_text(json.dumps(QWEN3_8B))
    row = json.dumps({"question": "How many clips are 2 and 2?", "answer": "2 and 2 are 4.\n#### 4"}) + "\n"
    (tmp_path / "questions.jsonl").write_text(row * 7473)
    wanted = NewRun(str(tmp_path / "qwen"), str(tmp_path / "questions.jsonl"), instance)
    written = new_run(wanted, tmp_path / "run.yaml").values
    if instance.startswith("trn2"):
        assert written["engine"] == "torch" and written["env"] == shown("trn1.32xlarge")["env"]
        return
    page = shown(instance)
    run_file.validate(page, "run.yaml")
    assert page["model"] == {"source": "Qwen/Qwen3-8B"} and "answer_pattern" in page["generate"]
    if instance.startswith("trn1"):
        assert page["training"].pop("activation_checkpointing") == "none"
    rest = {name: value for name, value in written.items() if name not in ("model", "generate", "name")}
    assert page == rest | {name: page[name] for name in ("model", "generate", "name")}
    assert page["name"] == "qwen3-8b-questions-lora"
