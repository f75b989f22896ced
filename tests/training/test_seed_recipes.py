"""The recipes for GPT-J and Flan-T5 end to end at toy size, with one to four ranks.

Each is the packaged recipe with other values of a few keys: a toy model and its data, degrees of
small nodes, few steps. The rest is as shipped: method, format, precision, packing, checkpointing, what is kept.
"""

import json
import math
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from transformers import GPTJConfig, GPTJForCausalLM

from hyperpod_ft.checkpoint.verify.verify import verify
from hyperpod_ft.config import run_file
from hyperpod_ft.runs.run import Run
from tests.training.conftest import Jobs
from tests.training.every_stage import perform
from tests.unit import tiny_t5, tiny_tokenizer

pytestmark = [pytest.mark.training, pytest.mark.timeout(600)]

WORDS = ["red", "blue", "green", "dog", "cat", "bird", "seven"]
ROWS = [
    {"instruction": f"swap {one} {other}", "context": "", "response": f"{other} {one}", "category": "open_qa"}
    for one in WORDS
    for other in WORDS
    if one != other
]
TEXT = [f"### Instruction\n{row['instruction']}\n\n### Answer\n{row['response']}" for row in ROWS]
# without accelerators
TOY = {
    "cluster.instance_type": "local",
    "cluster.partition": "null",
    "env.python": "current",
    "model.revision": "null",
    "dataset.revision": "null",
    "dataset.files": "[rows.jsonl]",
    "dataset.validation_share": 0.2,
    "training.epochs": 1,
    "training.max_steps": 4,
    "training.save_every_steps": 2,
    "training.validate_every_steps": 2,
    "training.learning_rate": 5e-3,
    "generate.max_new_tokens": 4,
    "generate.train_samples": 2,
    "generate.validation_samples": 2,
}
GPTJ = {
    "cluster.nodes": 2,
    "dataset.max_length": 256,
    "training.micro_batch_size": 1,
    "training.activation_offload": "true",
    "parallelism.ranks_per_node": 2,
}
# two ranks over which ZeRO-3 divides everything, as over the GPUs of two training jobs
SHARDED_T5 = {
    "cluster.nodes": 1,
    "dataset.max_length": 128,
    "dataset.max_target_length": 32,
    "parallelism.ranks_per_node": 2,
}
SST2 = {
    "cluster.nodes": 1,
    "dataset.files": "[sst2/*]",
    "dataset.validation_share": 0,
    "dataset.max_length": 256,
    "dataset.validation_source.revision": "null",
    "training.validate_every_steps": "null",
    "training.micro_batch_size": 1,
    "parallelism.ranks_per_node": 2,
}
T5 = {"cluster.nodes": 1, "dataset.max_length": 128, "dataset.max_target_length": 32, "parallelism.ranks_per_node": 1}


def gptj(directory: Path) -> None:
    tokenizer = tiny_tokenizer.make(chat_template=None, adds_bos=False)
    tokenizer.save_pretrained(directory)
    sizes = {"vocab_size": len(tokenizer), "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 512}
    no_dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(0)
    GPTJForCausalLM(GPTJConfig(**sizes, **no_dropout, **ids, rotary_dim=8)).save_pretrained(directory)


def overrides(directory: Path, model: Path, changes: dict[str, Any]) -> list[str]:
    places = {"cluster.root": directory / "root", "model.source": model, "dataset.source": directory / "data"}
    values = TOY | places | changes
    return [f"{key}={value}" for key, value in values.items()]


def sst2(directory: Path) -> None:
    """Two splits of GLUE's parquet files, with its columns."""
    directory.mkdir(parents=True)
    rows = [
        {"sentence": f"a {word} film {index} ", "label": index % 2, "idx": index}
        for index, word in enumerate(WORDS * 12)
    ]
    for split, some in (("train", rows[:-8]), ("validation", rows[-8:])):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(some), directory / f"{split}-00000-of-00001.parquet")


def test_sentiments_of_two_splits_are_learned(jobs: Jobs, tmp_path: Path) -> None:
    gptj(tmp_path / "gptj")
    sst2(tmp_path / "data" / "sst2")
    changes = SST2 | {"dataset.validation_source.source": tmp_path / "data"}
    recipe = run_file.find("gptj-6b-sst2-p4d")
    run = perform(Run.of(run_file.load(recipe, overrides(tmp_path, tmp_path / "gptj", changes))), jobs.train)
    assert verify(run.paths.tuned_model).findings == ()
    samples = json.loads(run.paths.samples_path.read_text())
    assert samples["validation_loss"]["tuned"]["mean"] < samples["validation_loss"]["base"]["mean"]
    shown = {row["prompt"]: (row["split"], row["expected"]) for row in samples["samples"]}
    rows = {
        split: pyarrow.parquet.read_table(next((tmp_path / "data" / "sst2").glob(f"{split}-*"))).to_pylist()
        for split in ("train", "validation")
    }
    assert (
        shown.items()
        <= {
            f"{row['sentence'].strip()}\nSentiment:": (split, " positive" if row["label"] else " negative")
            for split, some in rows.items()
            for row in some
        }.items()
    )
    assert sorted(split for split, _ in shown.values()) == ["train", "train", "validation", "validation"]
    assert str(run.plan.degrees) == "dp 1 x tp 2"


def test_the_recipes_train_and_answer(jobs: Jobs, tmp_path: Path) -> None:
    gptj(tmp_path / "gptj")
    tiny_t5.save(tmp_path / "t5", TEXT)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    def load(recipe: str, model: str, changes: dict[str, Any]) -> Run:
        return Run.of(run_file.load(run_file.find(recipe), overrides(tmp_path, tmp_path / model, changes)))

    runs = {"gptj-6b-full-p4d": perform(load("gptj-6b-full-p4d", "gptj", GPTJ), jobs.train)}
    for recipe in ("flan-t5-xl-full-p4d", "flan-t5-xxl-lora-p4d"):
        runs[recipe] = perform(load(recipe, "t5", T5))
    recipe = "flan-t5-xxl-full-training-job"
    runs[recipe] = perform(load(recipe, "t5", SHARDED_T5), jobs.train)
    for recipe, run in runs.items():
        assert verify(run.paths.tuned_model).findings == (), recipe
        facts = run.journal.record("train").facts  # type: ignore[union-attr]
        steps = [json.loads(line) for line in run.paths.metrics_path.read_text().splitlines()]
        assert [row["step"] for row in steps] == [1, 2, 3, 4] and math.isfinite(facts["final_loss"])
        # the best weights are what is consolidated: their loss is that of the model in the end
        assert (run.paths.best_checkpoint / "checkpoint.json").exists()
        losses = json.loads(run.paths.samples_path.read_text())["validation_loss"]
        assert losses["tuned"]["mean"] == pytest.approx(facts["best_validation_loss"], rel=0.02), recipe
        assert losses["tuned"]["mean"] < losses["base"]["mean"]
    degrees = runs["gptj-6b-full-p4d"].plan.degrees
    assert (str(degrees), degrees.nodes) == ("dp 2 x tp 2", 2)
    facts = {recipe: run.journal.record("train").facts for recipe, run in runs.items()}  # type: ignore[union-attr]
    assert facts["gptj-6b-full-p4d"]["sharding"] == "zero1 over 2 ranks"
    assert facts["flan-t5-xxl-full-training-job"]["sharding"] == "zero3 over 2 ranks"
    adapter = json.loads((runs["flan-t5-xxl-lora-p4d"].paths.adapter / "adapter_config.json").read_text())
    assert set(adapter["target_modules"]) == {"q", "k", "v", "o", "wi_0", "wi_1", "wo"}
