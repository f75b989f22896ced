"""What files of other tools name."""

import json
from pathlib import Path

import pytest

from scripts.memory_table import LLAMA_3_8B


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps(LLAMA_3_8B))
    bird = {"instruction": "Name a bird.", "input": "", "output": "A tit."}
    (tmp_path / "birds.jsonl").write_text(json.dumps(bird) + "\n")
    pair = {"prompt": "Name a bird.", "chosen": "A tit.", "rejected": "A bat."}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pair) + "\n")
    (tmp_path / "sums.jsonl").write_text('{"prompt": "1 + 1 =", "solution": "2"}\n')
    (tmp_path / "rewards.py").write_text("def polite(prompt, completion, /, **columns): return 1.0\n")
    opinion = {"prompt": "Name a bird.", "completion": "A bat.", "label": False}
    (tmp_path / "feedback.jsonl").write_text(json.dumps(opinion) + "\n")
    labels = {"prompt": "prompt", "response": "completion", "kto_tag": "label"}
    pairs = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
    described = {
        "birds": {"file_name": "birds.jsonl"},
        "feedback": {"file_name": "feedback.jsonl", "columns": labels},
        "pairs": {"file_name": "pairs.jsonl", "ranking": True, "columns": pairs},
        "talks": {"file_name": "talks.jsonl", "formatting": "sharegpt", "columns": {"kto_tag": "label"}},
    }
    (tmp_path / "dataset_info.json").write_text(json.dumps(described))
    return tmp_path
