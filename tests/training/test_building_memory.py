"""Building a model for bf16 training needs no more memory than training, and masters keep the files' values."""

import gc
import json
from pathlib import Path

import pytest
import torch
from memory import live_bytes, meshes_of, peak_during
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from hyperpod_ft.engines.torch.build import ShardedModel, build
from hyperpod_ft.engines.torch.loading.slices import BLOCK_BYTES
from hyperpod_ft.engines.torch.optimizer.adamw import AdamW
from hyperpod_ft.engines.torch.sharding.shards import Pieces
from hyperpod_ft.planning.layout import Sharding
from hyperpod_ft.planning.model_shape import model_shape
from hyperpod_ft.planning.t5_shape import t5_shape
from hyperpod_ft.planning.torch.step_memory import memory_of
from tests.tasks import task_of
from tests.training.conftest import MakeRun, tiny_llama
from tests.unit import tiny_t5

pytestmark = pytest.mark.training

FULL_BF16 = {"training.method": "full", "training.precision": "bf16"}


# with fewer shard ranks, the state of training is larger than any copy that loading could make
@pytest.mark.parametrize(
    "sharding", [Sharding("replicated", 1, "none"), Sharding("zero1", 8, "none"), Sharding("zero1", 8, "optimizer")]
)
def test_building_needs_no_more_than_training(make_run: MakeRun, sharding: Sharding) -> None:
    model = tiny_llama(vocab_size=2000, hidden_size=512, intermediate_size=1536, num_hidden_layers=6)
    run = make_run("run", FULL_BF16 | {"parallelism": {"ranks_per_node": sharding.shard_ranks}}, model=model)
    degrees, shape = run.plan.degrees, model_shape(model.to_dict())
    assert shape is not None
    counted = memory_of(run.config, degrees, shape)
    memory = counted.on_rank(counted.stages[0], sharding)
    built: list[tuple[ShardedModel, AdamW]] = []
    with meshes_of(1 % sharding.shard_ranks, sharding, sharding.shard_ranks) as meshes:

        def work() -> None:
            module = build(task_of(run, sharding), meshes)
            built.append((module, AdamW(module.trained_weights, run.config.training, lambda _: 1.0)))

        gc.collect()  # what earlier tests left must not go away in between
        before = live_bytes()
        peak = peak_during(work) - before
        on_host = 0
        if sharding.offload == "optimizer":
            trained_weights = built[0][0].trained_weights
            # masters, gradients and both moments
            on_host = 4 * sum(trained_weights.master(name).nbytes for name in trained_weights.parameters)
        expected = memory.weights + memory.optimizer
        print(f"{sharding}: {(peak - on_host) / 1e6:.1f} MB, {(peak - on_host) / expected:.3f} of the estimate")
        # beside them, the buffer that files are read through
        assert 0.95 * expected < peak - on_host < 1.01 * expected + BLOCK_BYTES


@pytest.mark.parametrize("degree", [1, 4])
def test_the_estimate_of_a_t5s_weights_and_moments(make_run: MakeRun, degree: int) -> None:
    """On one of some tensor-parallel ranks, which divide the vocabulary too: of this model, most of it."""
    model = tiny_t5.config(d_model=256, d_ff=512, d_kv=32, num_heads=8, vocab_size=8001)
    ranks = {"ranks_per_node": degree, "tensor_parallel": degree}
    settings = FULL_BF16 | {"dataset.max_target_length": 32, "dataset.format": "prompt-completion"}
    run = make_run("run", settings | {"parallelism": ranks}, model=model)
    shape = t5_shape(json.loads((run.paths.base_model / "config.json").read_text()))
    sharding = Sharding("replicated", 1, "none")
    assert shape is not None
    counted = memory_of(run.config, run.plan.degrees, shape)
    memory = counted.on_rank(counted.stages[0], sharding)
    with meshes_of(0, sharding, degree, degree) as meshes:
        before = live_bytes()
        module = build(task_of(run, sharding), meshes)
        optimizer = AdamW(module.trained_weights, run.config.training, lambda _: 1.0)
        found = live_bytes() - before
        assert module.trainable_parameters > 0 and optimizer.steps == 0
    assert found == pytest.approx(memory.weights + memory.optimizer, rel=0.01)


@pytest.mark.parametrize("offload", ["none", "optimizer"])
@pytest.mark.parametrize(("shard_ranks", "tensor_parallel"), [(1, 1), (3, 1), (2, 2)])
def test_masters_are_the_files_values(make_run: MakeRun, shard_ranks: int, tensor_parallel: int, offload: str) -> None:
    """The base model is fp32: bf16 weights have lost half of its digits."""
    sharding = Sharding("zero1" if shard_ranks > 1 else "replicated", shard_ranks, offload)
    world_size = shard_ranks * tensor_parallel
    ranks = {"ranks_per_node": world_size, "tensor_parallel": tensor_parallel}
    run = make_run("run", FULL_BF16 | {"parallelism": ranks}, model=tiny_llama(tie_word_embeddings=True))
    files = load_file(Path(run.paths.base_model) / "model.safetensors")
    with meshes_of(world_size - 1, sharding, world_size, tensor_parallel) as meshes:
        trained_weights = build(task_of(run, sharding), meshes).trained_weights
        for name, master in trained_weights.state().items():
            for start, values in master.boxes if isinstance(master, Pieces) else [((0,) * master.ndim, master)]:
                expected = files[name][tuple(slice(a, a + n) for a, n in zip(start, values.shape, strict=True))]
                assert values.dtype == torch.float32 and values.numel() and torch.equal(values, expected), name
            weight = trained_weights.parameters[name].detach()
            for start, values in trained_weights.shards[name].unsharded.boxes(weight):
                expected = files[name][tuple(slice(a, a + n) for a, n in zip(start, values.shape, strict=True))]
                assert torch.equal(values, expected.bfloat16()), name


@pytest.mark.parametrize("offload", ["none", "optimizer"])
def test_what_a_class_keeps_in_fp32_is_not_rounded(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, offload: str
) -> None:
    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules_strict", {"norm"})
    sharding = Sharding("zero1", 2, offload)
    run = make_run("run", FULL_BF16 | {"parallelism": {"ranks_per_node": 2}})
    with meshes_of(1, sharding, 2) as meshes:
        trained_weights = build(task_of(run, sharding), meshes).trained_weights
    dtypes = {name: parameter.dtype for name, parameter in trained_weights.parameters.items()}
    assert dtypes == {name: torch.float32 if "norm" in name else torch.bfloat16 for name in dtypes}
    # what a group of parameters gathers is of one dtype
    assert all(len({dtypes[name] for name in names}) == 1 for names in trained_weights.buckets)
