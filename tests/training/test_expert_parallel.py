"""Ranks that divide the experts of a mixture train as ranks that each have all of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_sharding import Case, check, job, part
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from hyperpod_ft.engines.torch.model import expert_parallel
from hyperpod_ft.errors import UserError
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages import consolidate
from tests.training.conftest import VOCABULARY, Jobs, MakeRun, metrics, tiny_llama, train_here, write_rows
from tests.unit.tiny_families import FILE, MIXTURES, SIZES

pytestmark = pytest.mark.training

FULL: dict[str, Any] = {"training.method": "full", "training.learning_rate": 1e-3}
ADAPTERS: dict[str, Any] = {"training.method": "lora", "lora.target_modules": ["q_proj", "o_proj"]}
OF_EXPERTS = ADAPTERS | {"lora.target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
RECOMPUTED = {"training.activation_checkpointing": "full"}
SELECTIVE = {"training.activation_checkpointing": "selective"}
ACCUMULATED = {"training.gradient_accumulation_steps": 2}
BF16 = {"training.precision": "bf16"}
STEPS = 2


def config_of(model_type: str, **values: Any) -> PretrainedConfig:
    """Of a mixture whose experts are loaded unevenly."""
    sizes = SIZES | MIXTURES[model_type] | {"vocab_size": VOCABULARY, "initializer_range": 0.2}
    return AutoConfig.for_model(model_type, **sizes | values)


def divided(experts: int, sharding: str, ranks: int = 2, **more: Any) -> dict[str, Any]:
    return {"parallelism": {"ranks_per_node": ranks, "expert_parallel": experts, "sharding": sharding} | more}


def route_to(model: Path, *experts: int) -> None:
    """Let every token go to these experts, of which the first of two ranks has 0 and 1."""
    tensors = load_file(model / FILE)
    corrections = [name for name in tensors if name.endswith("e_score_correction_bias")]
    assert corrections
    chosen = torch.zeros(4)
    chosen[list(experts)] = 100
    save_file(tensors | {name: chosen.clone() for name in corrections}, model / FILE, {"format": "pt"})


def route_by_row(run: Run) -> None:
    """Let the tokens of a row be alike, and go to the first two experts or to the others.

    Of ranks that have the same experts, some then get no token while others get some.
    """
    input_ids = run.paths.dataset_path / "train" / "input_ids.npy"
    rows = np.load(input_ids)
    np.save(input_ids, np.repeat(rows[:, :1], rows.shape[1], 1))
    tensors = load_file(run.paths.base_model / FILE)
    routers = {
        name: value[:1] * torch.tensor([[1.0], [1], [-1], [-1]]) for name, value in tensors.items() if ".gate." in name
    }
    save_file(tensors | routers, run.paths.base_model / FILE, {"format": "pt"})


def assert_alike(jobs: Jobs, tmp_path: Path, like: dict[str, str], runs: dict[str, Run], limit: float = 1e-5) -> None:
    """Losses of all steps and the last gradients of runs, in one job, are those of the runs that they are `like`."""
    ranks = runs[next(iter(like))].plan.degrees.world_size
    names = [*dict.fromkeys([*like.values(), *like])]
    directories = [str(runs[name].paths.directory) for name in names]
    started = jobs.start(ranks, ["layouts_worker", str(STEPS), str(tmp_path), *directories])
    assert started.wait(300) == 0, started.text()
    found = {name: load_file(tmp_path / f"{name}.safetensors") for name in names}
    for name, other in like.items():
        one, expected = found[name], found[other]
        assert one.keys() == expected.keys()
        allowed = 0.05 if runs[name].config.training.precision == "bf16" else limit
        # one that is zero but for rounding, as of keys that are alike, has no scale of its own
        least = 1e-2 * max(value.abs().max() for key, value in expected.items() if key.startswith("gradient"))
        for key, value in expected.items():
            if not key.startswith("parameter"):
                off = float((one[key] - value).abs().max() / value.abs().max().clamp_min(least))
                assert off <= allowed, f"{name}: {key} is {off:.0e} off"


GROUPS: dict[str, tuple[str, dict[str, Any], dict[str, dict[str, Any]]]] = {
    "full": (
        "qwen3_moe",
        FULL | ACCUMULATED,
        {
            "replicated": divided(2, "replicated") | RECOMPUTED,
            "zero1": divided(2, "zero1") | {"training.activation_offload": True},
            "zero3": divided(2, "zero3"),
        },
    ),
    "bf16": ("deepseek_v3", FULL | BF16, {"zero1": divided(2, "zero1"), "zero3": divided(2, "zero3")}),
    "attention": ("qwen2_moe", ADAPTERS, {"replicated": divided(2, "replicated") | SELECTIVE}),
    "experts": (
        "gpt_oss",
        OF_EXPERTS | ACCUMULATED,
        {"zero1": divided(2, "zero1"), "zero3": divided(2, "zero3") | RECOMPUTED},
    ),
    # one of the ranks gets no token
    "uneven": (
        "glm4_moe",
        FULL,
        {
            "zero2": divided(2, "zero2") | RECOMPUTED,
            "zero3": divided(2, "zero3") | SELECTIVE,
        },
    ),
    "uneven-experts": (
        "glm4_moe",
        OF_EXPERTS | {"lora.target_modules": []},
        {"replicated": divided(2, "replicated")},
    ),
}


def test_losses_and_gradients_are_those_of_whole_experts(make_run: MakeRun, jobs: Jobs, tmp_path: Path) -> None:
    runs, like = {}, {}
    for group, (model_type, settings, layouts) in GROUPS.items():
        # with the routers' loss in one
        model = config_of(model_type, output_router_logits=group == "full")
        for name, layout in ({"whole": divided(1, "replicated")} | layouts).items():
            run = runs[f"{group}-{name}"] = make_run(f"{group}-{name}", settings | layout, model=model)
            if group.startswith("uneven"):
                route_to(run.paths.base_model, 0, 1)
            if group == "bf16":  # else rounding chooses between experts that are nearly alike
                route_to(run.paths.base_model, 0, 2)
            if name != "whole":
                like[f"{group}-{name}"] = f"{group}-whole"
    assert_alike(jobs, tmp_path, like, runs)


def test_four_ranks(make_run: MakeRun, jobs: Jobs, tmp_path: Path) -> None:
    layouts = {
        "whole": divided(1, "replicated", 4),
        "all": divided(4, "zero3", 4),
        "hybrid": divided(2, "zero3", 4, shard_ranks=2) | ACCUMULATED | {"training.micro_batch_size": 1},
        "shards": divided(4, "zero1", 4, shard_ranks=2),
        "rows": divided(4, "zero1", 4, context_parallel=2) | {"training.micro_batch_size": 4},
    }
    runs = {name: make_run(name, FULL | layout, model=config_of("qwen3_moe")) for name, layout in layouts.items()}
    like = {name: "whole" for name in layouts if name != "whole"}
    for name in ("whole", "zero1", "zero3"):
        layout = divided(1, "replicated", 4) if name == "whole" else divided(2, name, 4)
        settings = FULL | layout | {"training.micro_batch_size": 1}
        runs[f"alike-{name}"] = make_run(f"alike-{name}", settings, model=config_of("qwen3_moe"))
        route_by_row(runs[f"alike-{name}"])
    assert_alike(jobs, tmp_path, like | {f"alike-{name}": "alike-whole" for name in ("zero1", "zero3")}, runs)


SWITCHES: list[Case] = [
    ("replicated", 1, "none", 1),
    ("replicated", 1, "none", 2),
    ("zero3", 2, "none", 1),
    ("zero3", 2, "parameters", 2),
    ("zero1", 2, "optimizer", 2),
]


def test_training_continues_with_experts_divided_otherwise(make_run: MakeRun, jobs: Jobs, tmp_path: Path) -> None:
    moments = {"training.optimizer_state": "bf16"}
    runs = {
        "full": (make_run("full", FULL | divided(1, "auto"), model=config_of("qwen3_moe")), SWITCHES),
        "lora": (
            make_run("lora", OF_EXPERTS | moments | divided(1, "auto"), model=config_of("gpt_oss")),
            SWITCHES[1:4],
        ),
    }
    results = job(jobs, tmp_path, 2, runs)
    expected = {name: part(results[name, cases[0]], "straight") for name, (_, cases) in runs.items()}
    check(results, expected, parameter_limit=1e-3)


def test_the_tuned_model_is_that_of_one_rank(make_run: MakeRun, jobs: Jobs) -> None:
    """Also the best one, by the validation."""
    best = {"training.keep_best": True, "training.validate_every_steps": 2, "training.async_save": True}
    pairs = divided(2, "zero1", 4, shard_ranks=2)
    model = config_of("qwen3_moe")
    runs = [
        make_run("alone", FULL | best | {"training.micro_batch_size": 4}, model=model),
        make_run("four", FULL | best | pairs | {"training.micro_batch_size": 1}, model=model),
    ]
    for run, train in zip(runs, (train_here, jobs.train), strict=True):
        write_rows(run.paths.dataset_path / "validation", rows=3, max_length=32, seed=9)
        train(run)
        consolidate.work(run)
    alone, four = (
        [row[key] for row in metrics(run) for key in ("loss", "grad_norm", "validation_loss") if row[key]]
        for run in runs
    )
    assert len(alone) == 10 and four == pytest.approx(alone, rel=1e-5)
    expected, found = (load_file(run.paths.tuned_model / FILE) for run in runs)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_what_cannot_be_divided_is_refused(model_type: str) -> None:
    """A model of another class, and experts whose number the ranks do not divide."""
    config = tiny_llama() if model_type == "llama" else config_of(model_type)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)

    class Mesh:
        def get_group(self, _: str) -> "Mesh":
            return self

        def size(self) -> int:
            return 3

        def rank(self) -> int:
            return 0

    with pytest.raises(UserError, match=r"^parallelism\.expert_parallel: .*; set it to 1$"):
        expert_parallel.divide(model, Mesh())  # type: ignore[arg-type]
