"""The estimate of memory, compared with the tensors of a step: weights, gradients and optimizer state."""

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from memory import bytes_on_host, live_bytes, live_tensors, meshes_of, no_checkpoints, peak_during
from transformers import AutoConfig, PretrainedConfig

from hyperpod_ft.engines.ranks import Ranks
from hyperpod_ft.engines.torch import training_state
from hyperpod_ft.engines.torch.loop import TrainingLoop
from hyperpod_ft.engines.torch.model import expert_parallel
from hyperpod_ft.engines.torch.sharding import trained_weights
from hyperpod_ft.planning.layout import Sharding
from hyperpod_ft.planning.model_fit import shape_of
from hyperpod_ft.planning.torch import sharded_state
from hyperpod_ft.planning.torch.step_memory import memory_of
from hyperpod_ft.runs.run import Run
from tests.tasks import task_of
from tests.training.conftest import MakeRun, tiny_llama
from tests.unit.tiny_families import SIZES

pytestmark = pytest.mark.training

BUCKET_BYTES = 1 << 20  # smaller, in proportion to the model
FULL = {"training.method": "full"}
BF16 = FULL | {"training.precision": "bf16"}
WHOLE = {"lora.modules_to_save": ["embed_tokens", "lm_head"]}
DIVIDED = {"parallelism": {"ranks_per_node": 4, "expert_parallel": 2}}
ACCUMULATED = {"training.gradient_accumulation_steps": 2}
REPLICATED = Sharding("replicated", 1)
ZERO1, ZERO2, ZERO3 = (Sharding(mode, 2) for mode in ("zero1", "zero2", "zero3"))
OFFLOADED = [Sharding("zero1", 2, "optimizer"), Sharding("zero3", 2, "optimizer"), Sharding("zero3", 2, "parameters")]
CASES = {
    "full": (2, FULL, [REPLICATED, ZERO2, ZERO3]),
    "accumulated": (2, FULL | ACCUMULATED, [ZERO1, ZERO2]),
    "hybrid": (4, FULL | ACCUMULATED, [ZERO2, ZERO3]),
    "bf16": (2, BF16 | ACCUMULATED, [REPLICATED, ZERO1, ZERO3, *OFFLOADED]),
    "int8": (2, FULL | ACCUMULATED | {"training.optimizer_state": "int8"}, [ZERO1]),
    "lora": (2, {}, [REPLICATED, ZERO1, ZERO3]),
    # embedding and output matrix are most of what is trained, and larger than a bucket
    "whole": (2, WHOLE, [REPLICATED, ZERO2]),
}


@contextmanager
def training(run: Run, sharding: Sharding) -> Iterator[TrainingLoop]:
    """The training of one rank of several, of which the others do not exist.

    What it receives is undefined, and takes as much memory as if it were not.
    """
    ranks = run.plan.degrees.world_size
    with meshes_of(1, sharding, ranks, expert_parallel=run.plan.degrees.expert_parallel) as meshes:
        ranks = Ranks(1, ranks, 1, dist.HashStore())
        yield TrainingLoop(task_of(run, sharding), ranks, torch.device("cpu"), meshes)


def step(loop: TrainingLoop, number: int) -> None:
    loop.forward_backward(number)
    loop.optimizer.step(1e-4, torch.ones(()))


@pytest.mark.parametrize(
    ("name", "sharding"),
    [(name, sharding) for name, (_, _, shardings) in CASES.items() for sharding in shardings],
    ids=str,
)
def test_memory_is_as_estimated(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, name: str, sharding: Sharding
) -> None:
    for module in (sharded_state, trained_weights):
        monkeypatch.setattr(module, "BUCKET_BYTES", BUCKET_BYTES)
    monkeypatch.setattr(training_state, "Checkpoints", no_checkpoints)
    vocabulary = 8000 if name == "whole" else 2000
    model = tiny_llama(vocab_size=vocabulary, hidden_size=256, intermediate_size=768, num_hidden_layers=10)
    ranks, changes, _ = CASES[name]
    assert_as_estimated(make_run, model, ranks, changes, sharding)


MIXTURE_CASES = {
    "full": (2, FULL, [ZERO2, ZERO3]),
    "bf16": (2, BF16 | ACCUMULATED, [ZERO1]),
    "lora": (2, {}, [ZERO3]),
    "whole": (2, WHOLE, [ZERO1]),
    "experts": (2, {"lora.target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}, [REPLICATED]),
    "divided": (4, BF16 | DIVIDED, [Sharding("zero1", 4), Sharding("zero3", 4)]),
}


@pytest.mark.parametrize(
    ("name", "sharding"),
    [(name, sharding) for name, (_, _, shardings) in MIXTURE_CASES.items() for sharding in shardings],
    ids=str,
)
def test_memory_of_a_mixture_is_as_estimated(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, name: str, sharding: Sharding
) -> None:
    """Most parameters are those of experts, a layer's in two."""
    for module in (sharded_state, trained_weights):
        monkeypatch.setattr(module, "BUCKET_BYTES", BUCKET_BYTES)
    monkeypatch.setattr(training_state, "Checkpoints", no_checkpoints)
    # ranks that do not exist send no tokens
    monkeypatch.setattr(
        expert_parallel._DividedExperts,
        "forward",
        lambda experts, hidden, chosen, weights: experts.own_forward(hidden, chosen % experts.num_experts, weights),
    )
    sizes = {"vocab_size": 2000, "hidden_size": 128, "num_hidden_layers": 10, "num_experts": 16}
    model = AutoConfig.for_model("qwen3_moe", **SIZES | sizes | {"moe_intermediate_size": 64, "num_experts_per_tok": 2})
    ranks, changes, _ = MIXTURE_CASES[name]
    assert_as_estimated(make_run, model, ranks, changes, sharding)


def assert_as_estimated(
    make_run: MakeRun, model: PretrainedConfig, ranks: int, changes: dict[str, Any], sharding: Sharding
) -> None:
    shape = shape_of(json.loads(model.to_json_string()))
    assert shape is not None
    # few tokens: activations and logits are next to nothing
    settings: dict[str, Any] = {"parallelism": {"ranks_per_node": ranks}, "training.micro_batch_size": 1}
    run = make_run("run", settings | {"training.max_steps": 3} | changes, model=model, max_length=12)
    counted = memory_of(run.config, run.plan.degrees, shape)
    memory = counted.on_rank(counted.stages[0], sharding)
    expected = memory.weights + memory.gradients + memory.optimizer
    gc.collect()
    held = live_tensors()  # of earlier tests: one that is freed meanwhile would be taken off the peak
    others = live_bytes()
    with training(run, sharding) as loop:
        step(loop, 1)
        peak = peak_during(lambda: step(loop, 2)) - others - bytes_on_host(loop)
    print(f"{changes}, {sharding}: {peak / 1e6:.1f} MB, {peak / expected:.3f} of the estimate")
    del held
    assert 0.9 < peak / expected < 1.1
