"""A tiny T5 learns to swap two words, and with LoRA on that model to repeat one: every stage."""

import json
from pathlib import Path
from typing import Any

import pytest

from hyperpod_ft.checkpoint.verify.verify import verify
from hyperpod_ft.config import run_file
from hyperpod_ft.runs.run import Run
from tests.training.every_stage import perform
from tests.unit import tiny_t5

pytestmark = [pytest.mark.training, pytest.mark.timeout(600)]

WORDS = ["red", "blue", "green", "dog", "cat", "bird", "seven", "nine", "four"]
PAIRS = [(one, other) for one in WORDS for other in WORDS if one != other]


def settings(directory: Path, name: str, model: Path, rows: list[dict[str, str]], **changes: Any) -> dict[str, Any]:
    data = directory / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    training = {"precision": "fp32", "micro_batch_size": 4, "warmup_share": 0.05, "schedule": "constant"}
    return {
        "name": name,
        "engine": "torch",
        "cluster": {"root": str(directory / "root"), "instance_type": "local"},
        "env": {"python": "current"},
        "model": {"source": str(model)},
        "dataset": {
            "source": str(data),
            "format": "prompt-completion",
            "max_length": 64,
            "max_target_length": 48,
            "validation_share": 0.1,
        },
        "training": training | changes.pop("training"),
        "parallelism": {"ranks_per_node": 1},
    } | changes


def made(directory: Path, values: dict[str, Any]) -> Run:
    return perform(Run.of(run_file.resolve(run_file.validate(values, ""), directory)))


def same_rouge(run: Run) -> None:
    """What the last validation, and one before the training, measured is what stage generate did."""
    facts, found = run.journal.record("train").facts, json.loads(run.paths.samples_path.read_text())  # type: ignore[union-attr]
    for model, prefix in (("base", "base_validation_"), ("tuned", "validation_")):
        measured = {key.removeprefix(prefix): facts[key] for key in facts if key.startswith(f"{prefix}rouge")}
        if run.config.training.validate_every_steps or model == "tuned":
            assert measured == found["rouge"]["validation"][model] and measured["rouge_l"] > 0, model


def test_tuned_twice(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    swapped = [{"prompt": f"swap {one} {other}", "completion": f"{other} {one}"} for one, other in PAIRS]
    base = tiny_t5.save(tmp_path / "base", [f"{row['prompt']} say {row['completion']}" for row in swapped])
    training = {"method": "full", "epochs": 40, "learning_rate": 3e-3, "validate_rouge_rows": 8}
    run = made(tmp_path, settings(tmp_path, "swap", base, swapped, training=training, generate={"prompts": ["x"]}))
    assert run.journal.record("train").facts["final_loss"] < 0.2  # type: ignore[union-attr]
    assert verify(run.paths.tuned_model).findings == ()
    same_rouge(run)

    repeated = [{"prompt": f"say {one} {other}", "completion": f"{other} {other}"} for one, other in PAIRS]
    training = {"method": "lora", "epochs": 16, "learning_rate": 5e-3, "schedule": "cosine"}
    training |= {"validate_rouge_rows": 8, "validate_every_steps": 20}
    lora = {"r": 8, "alpha": 16, "target_modules": ["q", "k", "v", "o", "wi_0", "wi_1", "wo"]}
    answers = {"max_new_tokens": 12, "prompts": ["say red dog", {"prompt": "say cat four"}]}
    values = settings(tmp_path, "say", run.paths.tuned_model, repeated, training=training, lora=lora, generate=answers)
    capfd.readouterr()
    tuned = made(tmp_path, values)
    printed = capfd.readouterr().out
    assert "of sources" in printed and "of targets" in printed, "what dataset says about packing"
    found = json.loads(tuned.paths.samples_path.read_text())
    exact = found["exact_match"]["train"]
    assert exact["base"] == 0 and exact["tuned"] >= 6, exact
    assert "ROUGE-1/2/L, validation rows: base 0" in printed
    assert found["rouge"]["train"]["base"]["rouge_l"] < 0.7 < found["rouge"]["train"]["tuned"]["rouge_l"]
    assert [row["tuned"] for row in found["prompts"]] == ["dog dog", "four four"]
    same_rouge(tuned)
    # the loss of packed rows in training is that of padded pairs in transformers
    trained = tuned.journal.record("train").facts  # type: ignore[union-attr]
    assert trained["validation_loss"] == pytest.approx(found["validation_loss"]["tuned"]["mean"], rel=1e-4)
    adapter = json.loads((tuned.paths.adapter / "adapter_config.json").read_text())
    assert adapter["task_type"] == "SEQ_2_SEQ_LM"
    verified = verify(tuned.paths.tuned_model, adapter=tuned.paths.adapter, base=run.paths.tuned_model, logits=True)
    assert verified.findings == () and verified.logits is not None
