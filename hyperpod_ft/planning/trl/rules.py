"""Engine trl's rules: its part of planning (planning/engine_rules.py says what each name is for)."""

from pathlib import Path
from typing import Any

from hyperpod_ft.config.instances import Instance
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.planning.layout import Degrees, Layout, Sharding
from hyperpod_ft.planning.memory import Memory
from hyperpod_ft.planning.model_shape import ModelShape
from hyperpod_ft.planning.trl.memory import TrlMemory

TRIAL_LAUNCHER: tuple[str, ...] = ()
MEMORY_SETTINGS: tuple[tuple[str, Any], ...] = ()


def precompiles(config: RunConfig) -> bool:
    return False


def generates_on_accelerators(config: RunConfig) -> bool:
    return True


def imports(config: RunConfig) -> tuple[str, ...]:
    return ("trl",)


def variables(config: RunConfig, cache: Path) -> dict[str, str]:
    return {}


def graph_settings(config: RunConfig) -> dict[str, str]:
    return {}


def environment_name(config: RunConfig) -> str:
    return "trl-1.16"


def packages_remedy(config: RunConfig) -> str:
    return "install the `trl` extra there (pip install 'hyperpod-ft[trl]'), or remove env.python"


def program_directories(config: RunConfig, python: Path) -> tuple[Path, ...]:
    return ()


def default_tensor_parallel(instance: Instance, ranks: int) -> int:
    return 1


def layout(config: RunConfig, degrees: Degrees, shape: ModelShape | None) -> Layout:
    return Layout(degrees, Sharding("replicated", 1))


def sharding(config: RunConfig, degrees: Degrees, shape: ModelShape | None) -> str:
    return str(layout(config, degrees, shape).sharding)


def explain_pipeline(config: RunConfig, degrees: Degrees, shape: ModelShape) -> str | None:
    """There is none."""
    return None


def step_memory(config: RunConfig, degrees: Degrees, shape: ModelShape) -> list[Memory]:
    memory = TrlMemory(config, degrees, shape)
    return [memory.on_rank(stage) for stage in memory.stages]
