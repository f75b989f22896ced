"""model.new_tokens: a tiny Llama answers with a token that it did not have, through all stages."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from hyperpod_ft.checkpoint.verify.verify import verify
from hyperpod_ft.config import run_file
from hyperpod_ft.errors import UserError
from hyperpod_ft.runs.results.samples import Samples
from hyperpod_ft.runs.run import Run
from hyperpod_ft.upload import push
from tests.training.conftest import tiny_llama
from tests.training.every_stage import perform
from tests.unit import tiny_tokenizer

pytestmark = pytest.mark.training

TOOLS = ["<tool>", "</tool>"]
ANSWER = "<tool>fox</tool>"
ENDS = ["embed_tokens", "lm_head"]
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
WHOLE = {"lora": {"r": 8, "alpha": 16, "modules_to_save": ENDS}}


def learned(tmp_path: Path, *, tied: bool, changes: dict[str, Any]) -> Run:
    """The run of a model of 312 tokens that learns one answer."""
    tokenizer = tiny_tokenizer.make(chat_template=None)
    tokenizer.save_pretrained(tmp_path / "base")
    torch.manual_seed(7)
    config = tiny_llama(vocab_size=len(tokenizer), tie_word_embeddings=tied, bos_token_id=0, eos_token_id=1)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    rows = [{"prompt": "the quick brown", "completion": ANSWER}] * 8
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    values: dict[str, Any] = {
        "name": "tools",
        "engine": "torch",
        "cluster": {"root": str(tmp_path / "root"), "instance_type": "local"},
        "env": {"python": "current"},
        "model": {"source": str(tmp_path / "base"), "new_tokens": TOOLS},
        "dataset": {"source": str(tmp_path / "rows.jsonl"), "format": "prompt-completion", "max_length": 32},
        "training": {"precision": "fp32", "max_steps": 40, "learning_rate": 1e-2, "schedule": "constant"},
        "parallelism": {"ranks_per_node": 1},
        "generate": {"prompts": [{"prompt": "the quick brown"}], "max_new_tokens": 16, "train_samples": 0},
    }
    values["dataset"]["validation_share"] = 0
    for section, more in changes.items():
        values[section] = values.get(section, {}) | more
    return perform(Run.of(run_file.resolve(run_file.validate(values, ""), tmp_path)))


def assert_peft_adds_the_adapter(base: Any, run: Run, merged: Any) -> None:
    adapted, tokens = PeftModel.from_pretrained(base, run.paths.adapter), torch.arange(256, 320)[None]
    with torch.no_grad():
        torch.testing.assert_close(adapted(tokens).logits, merged(tokens).logits, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("tied", "changes"),
    [
        (False, WHOLE),
        (True, {"lora": {"r": 8, "alpha": 16, "target_modules": [*LINEAR, *ENDS]}}),
        (True, {"training": {"method": "full"}}),
    ],
    ids=["LoRA and whole ends", "LoRA of tied ends", "all parameters"],
)
def test_it_answers_with_tokens_that_it_did_not_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tied: bool, changes: dict[str, Any]
) -> None:
    run = learned(tmp_path, tied=tied, changes=changes)
    assert re.search(r"^new token '</tool>': [1-9]\d* times$", capsys.readouterr().out, re.MULTILINE)
    (answer,) = Samples.read(run.paths.samples_path).prompts
    assert (answer.tuned, answer.base == ANSWER) == (ANSWER, False)
    tokenizer: Any = AutoTokenizer.from_pretrained(run.paths.tuned_model)
    model: Any = AutoModelForCausalLM.from_pretrained(run.paths.tuned_model)
    assert model.get_input_embeddings().weight.shape[0] == model.config.vocab_size == 320
    asked = tokenizer("the quick brown", return_tensors="pt")
    ids = model.generate(**asked, max_new_tokens=16, do_sample=False)[0, asked["input_ids"].shape[1] :].tolist()
    assert {312, 313} < set(ids) and tokenizer.decode(ids, skip_special_tokens=True) == ANSWER
    adapter = run.paths.adapter if run.config.training.method == "lora" else None
    found = verify(run.paths.tuned_model, base=run.paths.base_model, adapter=adapter, logits=adapter is not None)
    assert found.ok, found.findings
    assert "| tokens added | `'<tool>'` `'</tool>'` |" in (run.paths.tuned_model / "README.md").read_text()
    against_original = verify(run.paths.tuned_model, base=run.paths.fetched_model)
    assert against_original.ok, against_original.findings
    if adapter:
        named = PeftConfig.from_pretrained(adapter).base_model_name_or_path
        assert_peft_adds_the_adapter(AutoModelForCausalLM.from_pretrained(named), run, model)
    if run.config.lora.modules_to_save:
        original = AutoModelForCausalLM.from_pretrained(run.config.model.source)
        original.resize_token_embeddings(320, mean_resizing=False)
        assert_peft_adds_the_adapter(original, run, model)
        with pytest.raises(UserError, match=r"^--adapter: .*model\.new_tokens"):
            push.stage_of(run, adapter=True)
