"""Engine torch's rules: its part of planning (planning/engine_rules.py says what each name is for)."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hyperpod_ft.config.instances import Instance
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning import torch_memory
from hyperpod_ft.planning.degrees import Degrees, divisors
from hyperpod_ft.planning.families import Family, divisible_types, family_of
from hyperpod_ft.planning.memory import Memory, stage_shares
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
    """All that divide the ranks can be trained."""
    torch_memory.sequence_parallel(config, degrees)


def check_family(config: RunConfig, family: str, degrees: Degrees) -> None:
    """Any family of transformers' causal models trains; dividing one, and packing for it, needs to know it."""
    check_packing(config, family)
    if degrees.tensor_parallel > 1:
        divisible_family(family)


def divisible_family(family: str) -> Family:
    """How the models of a config.json's model_type are built. Raises UserError when that is not known."""
    found = family_of(family)
    if found is None:
        raise UserError(
            f"parallelism.tensor_parallel: engine torch cannot divide models of type {family or '(none)'} over"
            " tensor-parallel ranks",
            f"set it to 1, so that data-parallel ranks share the model; it divides {divisible_types()}",
        )
    return found


def check_model_config(model_config: Mapping[str, Any]) -> None:
    """transformers 5 reads every spelling of config.json."""


def check_kv_heads(tensor_parallel: int, kv_heads: int) -> None:
    """Each rank has some key/value heads, or some ranks have copies of each."""
    if kv_heads % tensor_parallel and tensor_parallel % kv_heads:
        raise UserError(
            f"parallelism.tensor_parallel: {tensor_parallel} neither divides the model's {kv_heads} key/value heads nor"
            " is a multiple of them",
            f"set it to {divisors(kv_heads)}, or to a multiple of {kv_heads}",
        )


def check_shape(config: RunConfig, degrees: Degrees, shape: ModelShape) -> None:
    """A fused linear of queries, keys and values is divided, but holds no copies of heads."""
    family = family_of(shape.family)
    fused = family is not None and any(len(outputs) > 1 and "keys" in outputs for outputs in family.columns.values())
    if fused and degrees.tensor_parallel > shape.kv_heads:
        raise UserError(
            f"parallelism.tensor_parallel: {degrees.tensor_parallel} is more than the {shape.kv_heads} key/value heads"
            f" of a {shape.family} model, whose linears for them are one",
            f"set it to {divisors(shape.kv_heads)}",
        )


def sharding(config: RunConfig, degrees: Degrees, shape: ModelShape | None) -> str:
    return torch_memory.explain(config, degrees, shape)


def step_memory(config: RunConfig, degrees: Degrees, shape: ModelShape) -> Iterator[Memory]:
    chosen = torch_memory.choose(config, degrees, shape)
    for share in stage_shares(config, degrees, shape):
        yield torch_memory.on_rank(config, degrees, shape, share, chosen)
