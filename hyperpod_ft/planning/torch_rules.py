"""Engine torch's rules: its part of planning (planning/engine_rules.py says what each name is for)."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hyperpod_ft.config.instances import Instance
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning import pipeline, torch_memory
from hyperpod_ft.planning.degrees import Degrees, divisors
from hyperpod_ft.planning.memory import Memory
from hyperpod_ft.planning.model_shape import ModelShape
from hyperpod_ft.planning.packing_rules import check_packing

PRECOMPILES = False
GENERATES_ON_ACCELERATORS = True
IMPORTS: tuple[str, ...] = ("torch",)
MEMORY_SETTINGS: tuple[tuple[str, Any], ...] = (
    ("parallelism.sharding", "auto"),
    ("training.optimizer_state", "bf16"),
    ("parallelism.offload", "optimizer"),
    ("parallelism.offload", "parameters"),
)


def environment_name(config: RunConfig) -> str:
    return "torch"


def packages_remedy(config: RunConfig) -> str:
    return "install the `torch` extra there (pip install 'hyperpod-ft[torch]'), or remove env.python"


def program_directories(python: Path) -> tuple[Path, ...]:
    return ()


def training_settings(config: RunConfig) -> dict[str, Any]:
    return {}


def default_tensor_parallel(instance: Instance, ranks: int) -> int:
    return 1


def check_degrees(config: RunConfig, degrees: Degrees) -> None:
    pipeline.check_micro_batches(config, degrees)


def check_family(config: RunConfig, family: str, degrees: Degrees) -> None:
    """Any family of transformers' causal models trains; packing needs one that keeps packed documents apart."""
    check_packing(config, family)
    pipeline.check_family(degrees, family)


def check_model_config(model_config: Mapping[str, Any]) -> None:
    """transformers 5 reads every spelling of config.json."""


def check_kv_heads(tensor_parallel: int, kv_heads: int) -> None:
    """Key/value heads are not replicated."""
    if kv_heads % tensor_parallel:
        raise UserError(
            f"parallelism.tensor_parallel: {tensor_parallel} does not divide the model's {kv_heads} key/value heads,"
            " and engine torch does not replicate them",
            f"set it to {divisors(kv_heads)}",
        )


def check_shape(config: RunConfig, degrees: Degrees, shape: ModelShape) -> None:
    pipeline.check_layers(config, degrees, shape)


def sharding(config: RunConfig, degrees: Degrees, shape: ModelShape | None) -> str:
    return torch_memory.explain(config, degrees, shape)


def explain_pipeline(config: RunConfig, degrees: Degrees, shape: ModelShape) -> str | None:
    return pipeline.explain(config, degrees, shape) if degrees.pipeline_parallel > 1 else None


def step_memory(config: RunConfig, degrees: Degrees, shape: ModelShape) -> Iterator[Memory]:
    chosen = torch_memory.choose(config, degrees, shape)
    for share in torch_memory.rank_shares(config, degrees, shape):
        yield torch_memory.on_rank(config, degrees, shape, share, chosen)
