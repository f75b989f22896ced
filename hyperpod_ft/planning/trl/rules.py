"""Engine trl's rules: its part of planning (planning/engine_rules.py says what each name is for)."""

from pathlib import Path
from typing import Any

from hyperpod_ft.config.instances import Instance
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.planning.layout import Degrees, Layout, Sharding
from hyperpod_ft.planning.memory import Memory, available
from hyperpod_ft.planning.model_shape import ModelShape
from hyperpod_ft.planning.pins import requirements
from hyperpod_ft.planning.trl.memory import TrlMemory
from hyperpod_ft.planning.trl.settings import ATTENTION, attention, unsharded
from hyperpod_ft.planning.undivided.shape import UndividedShape
from hyperpod_ft.shipped import installing

_VLLM_ENVIRONMENT = "trl-1.16-vllm"
TRIAL_LAUNCHER: tuple[str, ...] = ()
MEMORY_SETTINGS: tuple[tuple[str, Any], ...] = (("parallelism.sharding", "auto"),)


def continues_elsewhere(config: RunConfig) -> bool:
    """The trainer reads no checkpoint of another sharding, and has random states for as many ranks as there were.

    What it computes over a rank's batch, such as KTO's KL divergence and sampled answers, depends on the ranks too.
    """
    return False


def precompiles(config: RunConfig) -> bool:
    return False


def generates_on_accelerators(config: RunConfig) -> bool:
    return True


def imports(config: RunConfig) -> tuple[str, ...]:
    further = {"math_verify" for reward in config.reward if reward.function == "math_verify"}
    further |= {"jsonschema" for reward in config.reward if reward.json_schema is not None}
    further |= {"PIL"} if config.dataset.images else set()
    further |= {"vllm"} if config.vllm_share else set()
    return ("trl", *ATTENTION[attention(config)], *sorted(further))


def variables(config: RunConfig, cache: Path | None) -> dict[str, str]:
    """torch.distributed.checkpoint, which reads a sharded checkpoint, would unpickle what is not a tensor.

    TRL would import MLflow, a tenth of the time in which a rank starts, for reports that the kit makes itself; vLLM
    would report its use to its authors.
    """
    found = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1", "DISABLE_MLFLOW_INTEGRATION": "TRUE"}
    found |= {"VLLM_NO_USAGE_STATS": "1"} if config.vllm_share else {}
    return {name: value for name, value in found.items() if name not in config.cluster.environment}


def graph_settings(config: RunConfig) -> dict[str, str]:
    return {}


def certified_settings(config: RunConfig) -> dict[str, Any]:
    return {"attention": attention(config)}


def environment_name(config: RunConfig) -> str:
    return _VLLM_ENVIRONMENT if config.vllm_share else "trl-1.16"


def packages_remedy(config: RunConfig) -> str:
    vllm = next(pin for pin in requirements(_VLLM_ENVIRONMENT) if pin.startswith("vllm=="))
    also = f" and {vllm}" if config.vllm_share else ""
    return f"install the `trl` extra there ({installing('trl')}){also}, or remove env.python"


def program_directories(config: RunConfig, python: Path) -> tuple[Path, ...]:
    return ()


def default_tensor_parallel(instance: Instance, ranks: int) -> int:
    return 1


def layout(config: RunConfig, degrees: Degrees, shape: ModelShape | None) -> Layout:
    """With `auto`, accelerate's FSDP2 shards a model that is not known to fit without."""
    given, room, ranks = config.parallelism.sharding, available(config), degrees.data_parallel
    replicated, sharded = Sharding("replicated", 1), Sharding("zero2" if given == "zero2" else "zero3", ranks)
    if given == "replicated" or ranks == 1 or not room:
        return Layout(degrees, replicated)
    known = None if shape is None or isinstance(shape, UndividedShape) else _memory(config, degrees, shape, replicated)
    fits = given == "auto" and known is not None and known.total <= room
    return Layout(degrees, replicated if fits or unsharded(config) else sharded)


def sharding(config: RunConfig, degrees: Degrees, shape: ModelShape | None) -> str:
    return str(layout(config, degrees, shape).sharding)


def explain_pipeline(config: RunConfig, degrees: Degrees, shape: ModelShape) -> str | None:
    """None: every rank has all layers."""
    return None


def step_memory(config: RunConfig, degrees: Degrees, shape: ModelShape) -> list[Memory]:
    if isinstance(shape, UndividedShape):
        return []
    return [_memory(config, degrees, shape, layout(config, degrees, shape).sharding)]


def _memory(config: RunConfig, degrees: Degrees, shape: ModelShape, sharding: Sharding) -> Memory:
    memory = TrlMemory(config, degrees, shape)
    return memory.on_rank(memory.stages[0], sharding)
