"""A pipeline computes what one process computes with plain transformers: losses, gradients, weights."""

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_divided_families import OWN, SIZES, TYPES
from test_layouts import differences, reference
from test_validation import mean_loss
from transformers import AutoConfig, PretrainedConfig

from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages import consolidate, merge
from tests.training.conftest import Jobs, MakeRun, curve, metrics, tiny_llama, write_rows
from tests.waiting import wait_for

pytestmark = pytest.mark.training

Case = tuple[str, int, str]
REPLICATED: Case = ("replicated", 1, "none")
FULL = {"training.method": "full"}
INTERLEAVED = {"pipeline_schedule": "interleaved"}
GPIPE = {"pipeline_schedule": "gpipe"}
FOUR_LAYERS = {"num_hidden_layers": 4}
LIMITS = {"loss": 1e-6, "gradient": 1e-5, "parameter": 1e-5, "validation": 1e-6, "norm": 1e-5}
STEPS = 2


@pytest.fixture
def make_pipeline(make_run: MakeRun) -> MakeRun:
    """Four ranks and eight rows in a step, in four micro batches for each data-parallel rank; five validation rows."""

    def make(name: str, parallelism: dict[str, Any], model: PretrainedConfig | None = None, **changes: Any) -> Run:
        degrees = ("pipeline_parallel", "tensor_parallel", "context_parallel")
        model_ranks = math.prod(parallelism.get(degree, 1) for degree in degrees)
        settings = {
            "parallelism": {"ranks_per_node": 4} | parallelism,
            "training.gradient_accumulation_steps": 2 if model_ranks == 1 else 4,
            "training.micro_batch_size": 2 * model_ranks // 4 or 1,
            "training.max_steps": 8,
            "training.max_grad_norm": 0.2,
            # AdamW moves elements whose gradient is mostly rounding as far as others: by little
            "training.learning_rate": 3e-5,
        }
        run = make_run(name, settings | changes, model=model or tiny_llama(**FOUR_LAYERS))
        if not (run.paths.dataset_path / "validation").exists():
            write_rows(run.paths.dataset_path / "validation", rows=5, max_length=32, seed=9)
        return run

    return make


def results(
    jobs: Jobs, tmp_path: Path, runs: dict[str, tuple[Run, list[Case]]], ranks: int = 4, steps: int = STEPS
) -> dict[tuple[str, Case], dict[str, torch.Tensor]]:
    """What all ranks found together, by run and sharding."""
    for run, cases in runs.values():
        (run.paths.directory / "shardings.json").write_text(json.dumps(cases))
    directories = [str(run.paths.directory) for run, _ in runs.values()]
    started = jobs.start(ranks, ["pipeline_worker", str(steps), str(tmp_path), *directories])
    assert started.wait() == 0, started.text()
    return {
        (name, case): load_file(tmp_path / f"{run.config.name}-{case[0]}-{case[2]}.safetensors")
        for name, (run, cases) in runs.items()
        for case in cases
    }


def check(found: dict[tuple[str, Case], dict[str, torch.Tensor]], like: dict[str, Run]) -> None:
    """Near plain transformers, which computes `like` by its name. Those of one run also agree in what it does not."""
    expected: dict[str, dict[str, torch.Tensor]] = {}
    for (name, case), tensors in found.items():
        run = like[name]
        if run.config.name not in expected:
            begin, end = (reference(run, steps) for steps in (0, STEPS))
            values = {key: tensor for key, tensor in begin.items() if key.startswith("gradient")}
            values |= {key: tensor for key, tensor in end.items() if key.startswith("parameter")}
            others = {key: tensors[key] for key in ("validation", "norm")}
            expected[run.config.name] = values | others | {"loss": end["loss"][:STEPS]}
        assert_near(tensors, expected[run.config.name], (name, case))


def assert_near(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], of: tuple[str, Case]) -> None:
    for kind, limit in LIMITS.items():
        off = differences(tensors, expected, kind)
        if kind == "parameter":  # a bias begins at zero: its largest value is that of a step
            off = {key: value / 100 if key.endswith(".bias") else value for key, value in off.items()}
        where = max(off, key=off.__getitem__)
        print(f"{of}: {kind}: {len(off)} tensors, {off[where]:.1e}")
        assert off[where] <= limit, (of, where)


def modes(*chosen: str) -> list[Case]:
    return [(mode, 1 if mode == "replicated" else 2, "none") for mode in chosen]


def test_lora(make_pipeline: MakeRun, jobs: Jobs, tmp_path: Path) -> None:
    # a frozen matrix that is tied is on both ends, which each read their own words of it
    tied = tiny_llama(**FOUR_LAYERS, tie_word_embeddings=True)
    both = {"pipeline_parallel": 2, "tensor_parallel": 2} | GPIPE
    runs = {
        "whole": (make_pipeline("whole", {"pipeline_parallel": 1}), [REPLICATED]),
        "pp4": (make_pipeline("pp4", {"pipeline_parallel": 4}), [REPLICATED]),
        "cp": (make_pipeline("cp", {"pipeline_parallel": 2, "context_parallel": 2}), [REPLICATED]),
        "dp": (make_pipeline("dp", {"pipeline_parallel": 2}), modes("zero1", "zero3")),
        "interleaved": (make_pipeline("interleaved", {"pipeline_parallel": 2} | INTERLEAVED), modes("zero2")),
        "tied_tp": (make_pipeline("tied_tp", both, model=tied), [REPLICATED]),
    }
    like = dict.fromkeys(runs, runs["whole"][0]) | {"tied_tp": runs["tied_tp"][0]}
    check(results(jobs, tmp_path, runs), like)


def test_full_with_tied_embeddings(make_pipeline: MakeRun, jobs: Jobs, tmp_path: Path) -> None:
    """Both ends of the pipeline hold the embedding, and sum their gradients of it."""
    tied = tiny_llama(**FOUR_LAYERS, tie_word_embeddings=True)
    offloaded: list[Case] = [("zero1", 2, "optimizer"), ("zero3", 2, "parameters")]
    two = {"pipeline_parallel": 2}
    kept = {"training.activation_checkpointing": "selective", "training.activation_offload": True}
    runs = {
        name: (make_pipeline(name, parallelism, model=tied, **FULL | changes), cases)
        for name, parallelism, changes, cases in (
            ("whole", {"pipeline_parallel": 1}, {}, [REPLICATED]),
            ("pp4", {"pipeline_parallel": 4}, {}, [REPLICATED]),
            ("tp", two | {"tensor_parallel": 2} | INTERLEAVED, {}, [REPLICATED]),
            ("dp", two, kept, modes("zero2") + offloaded),
            ("interleaved", two | INTERLEAVED, kept, modes("zero3")),
        )
    }
    check(results(jobs, tmp_path, runs), dict.fromkeys(runs, runs["whole"][0]))


def test_hybrid_sharding(make_pipeline: MakeRun, jobs: Jobs, tmp_path: Path) -> None:
    """Two stages, each of two groups of two ranks that share one copy."""
    tied = tiny_llama(**FOUR_LAYERS, tie_word_embeddings=True)
    settings = FULL | {"training.gradient_accumulation_steps": 2, "training.micro_batch_size": 1}
    runs = {
        name: (make_pipeline(name, {"ranks_per_node": 8, "pipeline_parallel": 2} | more, model=tied, **settings), cases)
        for name, more, cases in (
            ("hybrid", {}, modes("zero2", "zero3")),
            ("interleaved", INTERLEAVED, modes("zero1")),
        )
    }
    check(results(jobs, tmp_path, runs, ranks=8), dict.fromkeys(runs, runs["hybrid"][0]))


def test_bf16(make_pipeline: MakeRun, jobs: Jobs, tmp_path: Path) -> None:
    """What a model in one piece computes in bf16, but for the order of sums, which are in fp32."""
    bf16 = {"training.precision": "bf16"}
    whole, two = {"pipeline_parallel": 1}, {"pipeline_parallel": 2}
    runs = {
        name: (make_pipeline(name, parallelism, **bf16, **changes), cases)
        for name, parallelism, changes, cases in (
            ("lora-whole", whole, {}, [REPLICATED]),
            ("lora-pp2", two, {}, [REPLICATED]),
            ("full-whole", whole, FULL, [REPLICATED]),
            ("full-pp2", two, FULL, [REPLICATED]),
            ("full-interleaved", two | INTERLEAVED, FULL, modes("zero3")),
        )
    }
    found = results(jobs, tmp_path, runs)
    for (name, case), tensors in found.items():
        assert_near(tensors, found[f"{name.partition('-')[0]}-whole", REPLICATED], (name, case))


def test_families(make_pipeline: MakeRun, jobs: Jobs, tmp_path: Path) -> None:
    """In stages, and each divided: what transformers' forward pass does before and after the layers is done once."""
    layers = {"num_hidden_layers": 3}
    windows = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    own = {"granite": {"embedding_multiplier": 3.0}, "gemma2": windows, "gemma3_text": windows}
    runs = {}
    for index, model_type in enumerate(TYPES):
        model = AutoConfig.for_model(model_type, **SIZES | OWN.get(model_type, {}) | layers | own.get(model_type, {}))
        parallelism = {"pipeline_parallel": 2, "tensor_parallel": 2, "sequence_parallel": index % 4 != 1}
        runs[model_type] = make_pipeline(model_type, parallelism, model=model, **FULL), [REPLICATED]
    for (model_type, _), tensors in results(jobs, tmp_path, runs, steps=0).items():
        expected = reference(runs[model_type][0], 0)
        for kind, limit in (("loss", 1e-6), ("gradient", 1e-5)):
            off = differences({name: tensors[name] for name in expected}, expected, kind)
            where = max(off, key=off.__getitem__)
            print(f"{model_type}: {len(off)} of {kind}, {off[where]:.1e}")
            assert off[where] <= limit, (model_type, where)


def curves(run: Run) -> list[tuple[float, ...]]:
    return [(*step, row["validation_loss"] or 0.0) for step, row in zip(curve(run), metrics(run), strict=True)]


@pytest.mark.parametrize(
    ("method", "parallelism", "killed"),
    [
        ("full", {"pipeline_parallel": 2, "tensor_parallel": 2}, True),
        ("lora", {"pipeline_parallel": 2, "sharding": "zero3"} | INTERLEAVED, False),
    ],
    ids=["full-killed", "lora-stopped"],
)
def test_restart_best_weights_and_export(
    make_pipeline: MakeRun, jobs: Jobs, method: str, parallelism: dict[str, Any], killed: bool
) -> None:
    """Killed or stopped half way, training ends with the same bits; what is exported has the validation loss."""
    model = tiny_llama(**FOUR_LAYERS, tie_word_embeddings=True)
    changes = {
        "training.method": method,
        "training.max_steps": 6,
        "training.save_every_steps": 2,
        "training.validate_every_steps": 2,
        "training.keep_best": True,
        "training.async_save": method == "full",
        "training.learning_rate": 1e-3,
        "lora": {"r": 4, "alpha": 8, "dropout": 0.1},
    }
    undisturbed, disturbed = (
        make_pipeline(name, parallelism, model=model, **changes) for name in ("undisturbed", "disturbed")
    )
    jobs.train(undisturbed)
    job = jobs.start_held(disturbed, after_step=3)
    if killed:
        wait_for(disturbed.paths.checkpoint(2).exists)  # a thread writes it
        job.kill()
    else:
        os.kill(job.process.pid, signal.SIGTERM)
        assert job.wait(300) != 0
        stopped = metrics(disturbed)[-1]["step"]
        assert disturbed.paths.checkpoint(stopped).exists() and "SIGTERM" in job.text()
    said = jobs.train(disturbed)
    assert "resuming from step" in said
    assert curves(disturbed) == curves(undisturbed)
    facts = disturbed.journal.record("train").facts  # type: ignore[union-attr]
    consolidate.work(disturbed)
    if method == "lora":
        merge.work(disturbed)
    exported = mean_loss(disturbed.paths.tuned_model, disturbed.paths.dataset_path / "validation")
    assert exported == pytest.approx(facts["best_validation_loss"], rel=1e-5)
