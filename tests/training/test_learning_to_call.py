"""A tiny Qwen3 learns the conversation of docs/your-own-data.md, and calls the tool when OpenAI's client asks it."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.conversations import templates
from hyperpod_ft.checkpoint.formats.model_directory import stop_ids
from hyperpod_ft.config import run_file
from hyperpod_ft.data.prepared import PreparedDataset
from hyperpod_ft.runs.run import Run
from tests.pages.blocks import blocks
from tests.training.every_stage import perform
from tests.unit import tiny_tokenizer
from tests.unit.serving.conftest import serve

pytestmark = [pytest.mark.training, pytest.mark.timeout(600)]


def base(directory: Path, row: dict[str, Any]) -> Path:
    """Random weights, and a tokenizer with Qwen3's chat template."""
    tokenizer = tiny_tokenizer.make(templates()["qwen3"], adds_bos=False, texts=[json.dumps(row, ensure_ascii=False)])
    torch.manual_seed(7)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id,
    )
    tokenizer.save_pretrained(directory)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def test_it_calls_the_tool_that_it_was_taught(tmp_path: Path) -> None:
    row = json.loads(blocks("docs/your-own-data.md", "json")[1])
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 8, encoding="utf-8")
    values = {
        "name": "calls",
        "engine": "torch",
        "cluster": {"root": str(tmp_path / "root"), "instance_type": "local"},
        "env": {"python": "current"},
        "model": {"source": str(base(tmp_path / "base", row))},
        "dataset": {"source": str(tmp_path / "rows.jsonl"), "format": "chat", "max_length": 512, "validation_share": 0},
        "training": {
            "method": "full",
            "precision": "fp32",
            "micro_batch_size": 4,
            "max_steps": 100,
            "learning_rate": 5e-3,
        },
        "generate": {"prompts": [row["messages"][0]["content"]], "max_new_tokens": 96},
        "parallelism": {"ranks_per_node": 1},
    }
    run = perform(Run.of(run_file.resolve(run_file.validate(values, ""), tmp_path)))
    chats = PreparedDataset.open(run.paths.dataset_path).report()["chats"]
    # both turns are in one example: Qwen3 keeps the reasoning of calls until the user writes again
    assert (chats["turns"], chats["unrolled"], chats["compared_turns"]) == (16, 0, 16)
    assert stop_ids(run.paths.base_model) != stop_ids(run.paths.tuned_model)
    assert chats["ends"][0]["token"] in stop_ids(run.paths.tuned_model)
    server = serve(str(run.paths.directory))
    try:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300)
        asked = row["messages"][:1]
        first = client.chat.completions.create(model="tuned", messages=asked, tools=row["tools"], max_tokens=96)
        (call,) = first.choices[0].message.tool_calls or ()
        assert first.choices[0].finish_reason == "tool_calls"
        assert call.type == "function" and call.function.name == "get_weather"
        assert json.loads(call.function.arguments) == {"place": "Bern"}
        assert first.choices[0].message.reasoning_content == "I need today's weather."  # type: ignore[attr-defined]
        asked += [first.choices[0].message, {**row["messages"][2], "tool_call_id": call.id}]
        second = client.chat.completions.create(model="tuned", messages=asked, tools=row["tools"], max_tokens=96)
        assert (second.choices[0].finish_reason, second.choices[0].message.content) == ("stop", "3 °C.")
    finally:
        server.process.terminate()
        assert server.process.wait(300) == 0
