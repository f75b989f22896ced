"""The quickstart's real input: the question-answer rows and the tiny model that the kit ships."""

import json
import math
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from hyperpod_ft.config.sections.training import Training

QUICKSTART = Path(__file__).resolve().parents[2] / "examples" / "quickstart"
MODEL = QUICKSTART / "tiny-llama"


def read_json(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((MODEL / name).read_text(encoding="utf-8"))
    return content


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    return [json.loads(line) for line in (QUICKSTART / "qa.jsonl").read_text(encoding="utf-8").splitlines()]


def test_preferences_are_made_of_the_questions(rows: list[dict[str, str]]) -> None:
    made = runpy.run_path(str(QUICKSTART / "make_preferences.py"))["preference"]
    text = (QUICKSTART / "preferences.jsonl").read_text(encoding="utf-8")
    assert [json.loads(line) for line in text.splitlines()] == [made(row) for row in rows if not row["context"]]


def test_the_base_model_read_no_question(rows: list[dict[str, str]]) -> None:
    prose = (QUICKSTART / "facts.txt").read_text(encoding="utf-8").lower()
    assert [row["instruction"] for row in rows if row["instruction"].lower() in prose] == []
    assert "?" not in prose


def test_the_model_divides_over_two_ranks_and_can_be_served() -> None:
    config = read_json("config.json")
    assert config["architectures"] == ["LlamaForCausalLM"]
    # vLLM's attention kernels take heads of 32 elements and more
    assert config["head_dim"] == config["hidden_size"] // config["num_attention_heads"] == 32
    # what servers pass to the model; without it transformers assumes token_type_ids too
    assert read_json("tokenizer_config.json")["model_input_names"] == ["input_ids", "attention_mask"]
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "hidden_size", "vocab_size"):
        assert config[key] % 2 == 0, key
    assert config["max_position_embeddings"] >= 512


def test_the_special_tokens_agree() -> None:
    config, generation, tokenizer = (
        read_json(name) for name in ("config.json", "generation_config.json", "tokenizer.json")
    )
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    special = read_json("special_tokens_map.json")
    for kind in ("bos", "eos", "pad"):
        assert config[f"{kind}_token_id"] == generation[f"{kind}_token_id"] == ids[special[f"{kind}_token"]]
    assert len(tokenizer["model"]["vocab"]) == config["vocab_size"]
    assert "### Instruction" in read_json("tokenizer_config.json")["chat_template"]


TEXTS = {
    "English": "It was a bright cold day in the middle of winter, and the clocks were striking twelve. Margaret pulled"
    " her coat tighter and walked along the river, thinking about what her brother had said the night before.",
    "questions": "Question: What is the capital of France?\nAnswer: Paris\nQuestion: How old is it?\nAnswer: 8",
    "German": "Am nächsten Morgen ging die Großmutter über den Marktplatz, kaufte Brötchen und erzählte dem Bäcker von"
    " ihrer Reise nach Österreich. Das Wetter war trüb, doch die Kinder spielten fröhlich im Hof.",
    "Chinese": "春天来了，花园里的花都开了。孩子们在草地上奔跑，老人们坐在长椅上聊天。今天的天气非常好，阳光明媚。",
    "digits": "102.5,33.1,-7.25,880\n97.0,12.9,4.75,1024\n55.5,61.3,18.25,4096\n13.0,99.8,-2.5,65536\n",
    "code": Path(json.__file__).read_text(encoding="utf-8")[-2000:],
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_the_model_is_not_far_worse_than_guessing_on_foreign_text(text: str) -> None:
    """Otherwise training on a user's own file stops at step 1 (engines/sanity.py)."""
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(MODEL)
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    with torch.inference_mode():
        loss = model(input_ids=ids, labels=ids).loss.item()
    assert loss < math.log(model.config.vocab_size) + Training().sanity_margin / 2
