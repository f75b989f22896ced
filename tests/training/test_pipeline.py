"""A pipeline computes what one process computes with plain transformers: losses, gradients, weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_evaluation import mean_loss
from test_layouts import differences, reference
from transformers import GraniteConfig, LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from hyperpod_ft.planning import pipeline
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages import consolidate, merge
from tests.training.conftest import Jobs, MakeRun, curve, metrics, tiny_llama, write_rows

pytestmark = pytest.mark.training

Case = tuple[str, int, str]
REPLICATED: Case = ("replicated", 1, "none")
FULL = {"training.method": "full"}
INTERLEAVED = {"pipeline_schedule": "interleaved"}
GPIPE = {"pipeline_schedule": "gpipe"}
FOUR_LAYERS = {"num_hidden_layers": 4}
LIMITS = {"loss": 1e-6, "gradient": 1e-5, "parameter": 1e-5, "validation": 1e-6, "norm": 1e-5}
STEPS = 2  # of pipeline_worker


def of_family(kind: type[PretrainedConfig], **changes: Any) -> PretrainedConfig:
    values = tiny_llama(**FOUR_LAYERS).to_dict() | {"model_type": kind.model_type, "architectures": None}
    return kind(**values | changes)


@pytest.fixture
def make_pipeline(make_run: MakeRun) -> MakeRun:
    """Four ranks and eight rows in a step, in four micro batches for each data-parallel rank; five validation rows."""

    def make(name: str, parallelism: dict[str, Any], model: PretrainedConfig | None = None, **changes: Any) -> Run:
        model_ranks = parallelism["pipeline_parallel"] * parallelism.get("tensor_parallel", 1)
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
        if not (run.dataset_path / "validation").exists():
            write_rows(run.dataset_path / "validation", rows=5, max_length=32, seed=9)
        return run

    return make


def results(
    jobs: Jobs, tmp_path: Path, runs: dict[str, tuple[Run, list[Case]]]
) -> dict[tuple[str, Case], dict[str, torch.Tensor]]:
    """What all stages found together, by run and sharding; a tensor that two stages have must be the same bits."""
    for run, cases in runs.values():
        (run.directory / "shardings.json").write_text(json.dumps(cases))
    started = jobs.start(4, ["pipeline_worker", str(tmp_path), *(str(run.directory) for run, _ in runs.values())])
    assert started.wait(280) == 0, started.text()
    found: dict[tuple[str, Case], dict[str, torch.Tensor]] = {}
    for name, (run, cases) in runs.items():
        for case in cases:
            together = found.setdefault((name, case), {})
            for stage in range(run.plan.degrees.pipeline_parallel):
                tensors = load_file(tmp_path / f"{run.config.name}-{case[0]}-{case[2]}-{stage}.safetensors")
                for key, tensor in tensors.items():
                    assert torch.equal(together.setdefault(key, tensor), tensor), (name, case, key)
    return found


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
        for kind, limit in LIMITS.items():
            off = differences(tensors, expected[run.config.name], kind)
            if kind == "parameter":  # a bias begins at zero: its largest value is that of a step
                off = {key: value / 100 if key.endswith(".bias") else value for key, value in off.items()}
            where = max(off, key=off.__getitem__)
            print(f"{name} {case}: {kind}: {len(off)} tensors, {off[where]:.1e}")
            assert off[where] <= limit, (name, case, where)


def modes(*chosen: str) -> list[Case]:
    return [(mode, 1 if mode == "replicated" else 2, "none") for mode in chosen]


ALL_MODES = modes("replicated", "zero1", "zero2", "zero3")


def test_lora(make_pipeline: MakeRun, jobs: Jobs, tmp_path: Path) -> None:
    runs = {
        "whole": (make_pipeline("whole", {"pipeline_parallel": 1}), [REPLICATED]),
        "pp4": (make_pipeline("pp4", {"pipeline_parallel": 4}), [REPLICATED]),
        "gpipe": (make_pipeline("gpipe", {"pipeline_parallel": 4} | GPIPE), [REPLICATED]),
        "tp": (make_pipeline("tp", {"pipeline_parallel": 2, "tensor_parallel": 2}), [REPLICATED]),
        "dp": (make_pipeline("dp", {"pipeline_parallel": 2}), ALL_MODES),
        "interleaved": (make_pipeline("interleaved", {"pipeline_parallel": 2} | INTERLEAVED), ALL_MODES),
    }
    check(results(jobs, tmp_path, runs), dict.fromkeys(runs, runs["whole"][0]))


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
            ("dp", two, kept, [*ALL_MODES, *offloaded]),
            ("interleaved", two | INTERLEAVED, kept, [*ALL_MODES, *offloaded]),
        )
    }
    check(results(jobs, tmp_path, runs), dict.fromkeys(runs, runs["whole"][0]))


def test_families(make_pipeline: MakeRun, jobs: Jobs, tmp_path: Path) -> None:
    """What transformers' forward pass does before and after the layers is done once."""
    models = {
        "llama": of_family(LlamaConfig, attention_bias=True, mlp_bias=True),
        "mistral": of_family(MistralConfig, sliding_window=8),
        "qwen2": of_family(Qwen2Config, use_sliding_window=True, sliding_window=8, max_window_layers=2),
        "qwen3": of_family(Qwen3Config, head_dim=16, tie_word_embeddings=True),
        "granite": of_family(GraniteConfig, embedding_multiplier=3.0, residual_multiplier=0.5, logits_scaling=2.0),
    }
    assert models.keys() == pipeline.FAMILIES
    runs = {
        name: (make_pipeline(name, {"pipeline_parallel": 4}, model=model, **FULL), [REPLICATED])
        for name, model in models.items()
    }
    check(results(jobs, tmp_path, runs), {name: run for name, (run, _) in runs.items()})


def curves(run: Run) -> list[tuple[float, ...]]:
    return [(*step, row["validation_loss"] or 0.0) for step, row in zip(curve(run), metrics(run), strict=True)]


@pytest.mark.parametrize(
    ("method", "parallelism"),
    [
        ("full", {"pipeline_parallel": 2, "tensor_parallel": 2}),
        ("lora", {"pipeline_parallel": 2, "sharding": "zero3"} | INTERLEAVED),
    ],
    ids=["full", "lora"],
)
def test_restart_best_weights_and_export(
    make_pipeline: MakeRun, jobs: Jobs, method: str, parallelism: dict[str, Any]
) -> None:
    """Killed half way, training ends with the bits of one that was not; what is exported has the validation loss."""
    model = tiny_llama(**FOUR_LAYERS, tie_word_embeddings=True)
    changes = {
        "training.method": method,
        "training.max_steps": 8,
        "training.save_every_steps": 2,
        "training.evaluate_every_steps": 2,
        "training.keep_best": True,
        "training.async_save": method == "full",
        "training.learning_rate": 1e-3,
        "lora": {"r": 4, "alpha": 8, "dropout": 0.1},
    }
    undisturbed, killed = (
        make_pipeline(name, parallelism, model=model, **changes) for name in ("undisturbed", "killed")
    )
    jobs.train(undisturbed)
    job = jobs.start_train(killed)
    job.wait_for(lambda: killed.metrics_path.exists() and len(metrics(killed)) >= 5)
    job.kill()
    said = jobs.train(killed)
    assert "resuming from step" in said
    assert curves(killed) == curves(undisturbed)
    facts = killed.record("train").facts  # type: ignore[union-attr]
    consolidate.work(killed)
    if method == "lora":
        merge.work(killed)
    exported = mean_loss(killed.tuned_model, killed.dataset_path / "validation")
    assert exported == pytest.approx(facts["best_validation_loss"], rel=1e-5)
