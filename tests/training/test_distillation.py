"""Distillation: a model learns the probabilities of a teacher with its vocabulary."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hyperpod_ft.errors import UserError
from hyperpod_ft.launch import preflight
from hyperpod_ft.runs.run import Run
from tests.training.conftest import curve, metrics, tiny_llama, train_here
from tests.training.every_stage import perform
from tests.training.test_grpo import CHATS, made
from tests.training.test_trl import again_from
from tests.unit import tiny_tokenizer

pytestmark = pytest.mark.training


def taught(tmp_path: Path, method: str, **changes: Any) -> Run:
    """A run with a teacher that is narrower than its model, and of the same opinion after whatever it reads."""
    tokenizer, directory = tiny_tokenizer.make(), tmp_path / "teacher"
    values = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48, "initializer_range": 0.3}
    torch.manual_seed(8)
    teacher = AutoModelForCausalLM.from_config(tiny_llama(**values | changes))
    with torch.no_grad():
        teacher.get_input_embeddings().weight[:] = teacher.get_input_embeddings().weight[0].clone()
    teacher.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    training = {"objective": "distillation", "method": method, "max_steps": 20, "save_every_steps": 15}
    settings = {
        "reward": [],
        "sampling": {"generations": 8, "beta": 0.0},
        "teacher": {"source": str(directory)},
        "lora": {"modules_to_save": ["lm_head"]},
        "training": training | {"learning_rate": 1e-2},
        "generate": {"train_samples": 2, "max_new_tokens": 4},
    }
    return made(tmp_path, CHATS, settings)


def divergence(model: Path, teacher: Path) -> float:
    """From the teacher, of the next token after a prompt, in nats, by plain transformers."""
    said = tiny_tokenizer.make().apply_chat_template(CHATS[0]["prompt"], add_generation_prompt=True, return_dict=False)
    with torch.no_grad():
        ours, theirs = (
            AutoModelForCausalLM.from_pretrained(each)(torch.tensor([said])).logits[0, -1].log_softmax(-1)
            for each in (model, teacher)
        )
    return float((ours.exp() * (ours - theirs)).sum())


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_model_comes_to_its_teachers_opinion(tmp_path: Path, method: str) -> None:
    run = perform(taught(tmp_path, method))
    whole, losses = curve(run), [row["loss"] for row in metrics(run)]
    base, tuned = (divergence(each, tmp_path / "teacher") for each in (run.paths.base_model, run.paths.tuned_model))
    assert losses[0] == pytest.approx(base, rel=0.1) and losses[-1] < 0.05 * losses[0] and tuned < 0.05 * base
    assert "| objective | distillation of " in (run.paths.tuned_model / "README.md").read_text(encoding="utf-8")
    again_from(run, 15)
    assert train_here(run).facts["resumed_from"] == [15] and curve(run) == whole


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"vocab_size": 9}, r"^teacher\.source: the teacher's vocabulary is not that of"),
        ({"max_position_embeddings": 9}, r"is longer than the teacher's 9 positions"),
    ],
)
def test_another_kind_of_teacher_is_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    run = taught(tmp_path, "lora", **changes)
    for refusing in (preflight.check_run, perform):  # on the head node, and by stage download
        with pytest.raises(UserError, match=says):
            refusing(run)
