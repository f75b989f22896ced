"""The load of a mixture's experts in a training's record is that of the router's choices, token by token."""

from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from hyperpod_ft.config.sections.training import Training
from hyperpod_ft.engines.batches import Batch
from hyperpod_ft.engines.torch.model import activations, language_model
from hyperpod_ft.engines.torch.model.expert_load import ExpertCounts
from hyperpod_ft.runs.results import expert_load
from hyperpod_ft.runs.results.expert_load import LayerLoad
from hyperpod_ft.runs.run import Run
from tests.training.conftest import Jobs, MakeRun, metrics, train_here
from tests.training.test_router_loss import LENGTHS, config_of, prepared
from tests.unit.tiny_families import FILE, MIXTURES, SIZES

pytestmark = pytest.mark.training

DEAD = 2  # the expert of each layer that no token wins
STEP: dict[str, Any] = {"training.method": "full", "training.max_steps": 1, "training.micro_batch_size": 2}


def mixture(make_run: MakeRun, settings: dict[str, Any]) -> Run:
    """A run of a GPT-OSS with a dead expert in each layer, and four rows of one document and its padding."""
    run = make_run(model=config_of("gpt_oss", output_router_logits=False), settings=STEP | settings, rows=4)
    prepared(run)
    tensors = load_file(run.paths.base_model / FILE)
    for bias in (value for name, value in tensors.items() if name.endswith("router.bias")):
        bias[DEAD] = -1e4
    save_file(tensors, run.paths.base_model / FILE, {"format": "pt"})
    return run


def by_hand(run: Run) -> dict[str, LayerLoad]:
    """From what the routers of plain transformers say of the rows' tokens, padding left out."""
    model = AutoModelForCausalLM.from_pretrained(run.paths.base_model)
    names = [f"model.layers.{number}.mlp" for number in range(model.config.num_hidden_layers)]
    found = dict.fromkeys(names, torch.zeros(model.config.num_local_experts))
    for row, length in zip(np.load(run.paths.dataset_path / "train" / "input_ids.npy"), LENGTHS, strict=True):
        with torch.inference_mode():
            said = model(torch.from_numpy(row[None, :length]).long(), output_router_logits=True)
        for name, logits in zip(names, said.router_logits, strict=True):
            found[name] = found[name] + torch.bincount(logits.topk(2).indices.flatten(), minlength=4)
    assert all(counts.sum() == 2 * sum(LENGTHS) and counts[DEAD] == 0 for counts in found.values())
    return {
        name: LayerLoad(
            round(float(counts.max() / counts.mean()), 4), round(float(counts.min() / counts.mean()), 4), dead=1
        )
        for name, counts in found.items()
    }


MODES: dict[str, dict[str, Any]] = {
    "two passes": {"training.gradient_accumulation_steps": 2},
    "adapters": {"training.method": "lora", "training.micro_batch_size": 4}
    | {"lora.target_modules": [], "lora.target_parameters": ["experts.down_proj"]},
}


@pytest.mark.parametrize("mode", MODES)
def test_loads_are_those_of_the_routers(make_run: MakeRun, mode: str) -> None:
    run = mixture(make_run, MODES[mode])
    expected = by_hand(run)
    facts = train_here(run).facts
    assert expert_load.read(facts) == (expected, expected)
    (row,) = metrics(run)
    assert row["expert_load_max"] == max(load.largest for load in expected.values())
    assert row["dead_experts"] == len(expected)


def test_ranks_add_up_and_a_restart_keeps_the_first_step(make_run: MakeRun, jobs: Jobs) -> None:
    divided = {"parallelism": {"ranks_per_node": 2, "sharding": "zero3"}, "training.max_steps": 2}
    run = mixture(make_run, divided | {"training.save_every_steps": 1})
    expected = by_hand(run)
    jobs.train(run)
    record = run.journal.record("train")
    assert record is not None
    first, last = expert_load.read(record.facts)
    assert first == expected and last and last != first
    run.paths.record_path("train").unlink()
    (run.paths.checkpoints / "step-00000002" / "checkpoint.json").unlink()
    jobs.train(run)
    record = run.journal.record("train")
    assert record is not None and record.facts["resumed_from"] == [1]
    assert expert_load.read(record.facts) == (first, last)


def test_a_model_without_experts_has_no_load(make_run: MakeRun) -> None:
    run = make_run(settings=STEP)
    facts = train_here(run).facts
    names = {"expert_load", expert_load.LARGEST, expert_load.DEAD}
    assert not names.intersection((*facts, *metrics(run)[0]))


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_each_token_that_trains_counts_once(mode: str) -> None:
    """Recomputation and validation do not count it again. In parts of rows, padding counts as tokens do."""
    sizes = SIZES | MIXTURES["qwen3_moe"]
    for whole_rows, tokens in (True, 9), (False, 12):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **sizes))
        language_model.return_loss(model)
        activations.checkpoint_layers(list(model.model.layers), Training(activation_checkpointing=mode))
        counts = ExpertCounts(model, torch.device("cpu"), whole_rows=whole_rows)
        ids = torch.full((1, 12), 5)
        labels, positions = torch.where(torch.arange(12) < 9, ids, -100), torch.arange(12).remainder(9)[None]
        inputs = language_model.inputs(Batch(ids, labels, positions), torch.device("cpu"))
        model.train()(**inputs).backward()
        model.eval()(**inputs)
        assert sorted(counts.take().tolist()) == 4 * [0] + 4 * [tokens], "all tokens are the same"
        assert not counts.take().any()
