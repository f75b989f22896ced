"""What planning needs from an engine: what it cannot do, and the rules that differ, in a module each."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from hyperpod_ft.config.instances import Instance
from hyperpod_ft.config.run_config import EngineName, RunConfig
from hyperpod_ft.planning.layout import Degrees, Layout
from hyperpod_ft.planning.memory import Memory
from hyperpod_ft.planning.model_shape import ModelShape
from hyperpod_ft.planning.neuron import limits as neuron_limits
from hyperpod_ft.planning.neuron import rules as neuron_rules
from hyperpod_ft.planning.torch import limits as torch_limits
from hyperpod_ft.planning.torch import rules as torch_rules
from hyperpod_ft.planning.trl import limits as trl_limits
from hyperpod_ft.planning.trl import rules as trl_rules


class Limits(Protocol):
    """The contents of an engine's module of limits: what it cannot do. Every function raises UserError."""

    def check_settings(self, config: RunConfig) -> None:
        """Refuse settings that it does not support, alone or together."""

    def check_degrees(self, config: RunConfig, degrees: Degrees) -> None:
        """Refuse degrees that divide the ranks but cannot be trained."""

    def check_model_config(self, config: RunConfig, degrees: Degrees, model_config: Mapping[str, Any]) -> None:
        """Refuse a model by its config.json: a family, or what its transformers would misread."""

    def check_family(self, config: RunConfig, degrees: Degrees, family: str) -> None:
        """Refuse a family of models that cannot be trained. `family` is config.json's model_type."""

    def check_kv_heads(self, tensor_parallel: int, kv_heads: int) -> None:
        """Refuse key/value heads that cannot be divided."""

    def check_shape(self, config: RunConfig, degrees: Degrees, shape: ModelShape) -> None:
        """Refuse a model whose parts, other than attention heads and MLP, cannot be divided or trained."""


class EngineRules(Protocol):
    """The contents of an engine's module of rules."""

    TRIAL_LAUNCHER: tuple[str, ...]
    """The command under which stage precompile starts a node's ranks, if it needs one."""

    MEMORY_SETTINGS: tuple[tuple[str, Any], ...]
    """Settings of this engine alone that save memory: keys of the run file and their values, the cheapest first."""

    def continues_elsewhere(self, config: RunConfig) -> bool:
        """Whether a training continues from its checkpoints, to the same result, with other degrees or instances.

        If so, neither is part of its fingerprint, nor are settings that save time or memory (`_PLACE` in plan.py).
        """

    def precompiles(self, config: RunConfig) -> bool:
        """Whether its graphs are compiled before training, by stage precompile."""

    def generates_on_accelerators(self, config: RunConfig) -> bool:
        """Whether stage generate uses the accelerators; otherwise it runs on CPUs."""

    def imports(self, config: RunConfig) -> tuple[str, ...]:
        """Modules that its Python environment must have, besides those of the kit's own code."""

    def variables(self, config: RunConfig, cache: Path | None) -> dict[str, str]:
        """Environment variables of the jobs that compile and train. `cache`: that of stage precompile, if there is one.

        Those that `cluster.environment` sets are left out.
        """

    def graph_settings(self, config: RunConfig) -> dict[str, str]:
        """The variables that change the compiled graphs, and what else of this engine alone does."""

    def certified_settings(self, config: RunConfig) -> dict[str, Any]:
        """What of this engine alone changes what stage certify tries."""

    def environment_name(self, config: RunConfig) -> str:
        """Name of the file in pins/ with the packages of its Python environment."""

    def packages_remedy(self, config: RunConfig) -> str:
        """What to do when its Python environment lacks a package."""

    def program_directories(self, config: RunConfig, python: Path) -> tuple[Path, ...]:
        """Where training looks for programs before PATH. `python` is the interpreter of its environment."""

    def default_tensor_parallel(self, instance: Instance, ranks: int) -> int:
        """The tensor-parallel degree of nodes with `ranks` ranks when the run file gives none."""

    def layout(self, config: RunConfig, degrees: Degrees, shape: ModelShape | None) -> Layout:
        """How ranks divide a model that has passed the checks. `shape` None: the size of the model is unknown."""

    def sharding(self, config: RunConfig, degrees: Degrees, shape: ModelShape | None) -> str:
        """What data-parallel ranks divide, in words. `shape` as for `layout`."""

    def explain_pipeline(self, config: RunConfig, degrees: Degrees, shape: ModelShape) -> str | None:
        """How the pipeline is cut and what it loses, in words; None without one, or where another library cuts it."""

    def step_memory(self, config: RunConfig, degrees: Degrees, shape: ModelShape) -> Iterable[Memory]:
        """Memory of a training step on a rank of each pipeline stage; empty where it is not known."""


_LIMITS: dict[EngineName, Limits] = {"torch": torch_limits, "neuron": neuron_limits, "trl": trl_limits}
_RULES: dict[EngineName, EngineRules] = {"torch": torch_rules, "neuron": neuron_rules, "trl": trl_rules}


def limits_of(engine: EngineName) -> Limits:
    """The limits of an engine."""
    return _LIMITS[engine]


def rules_of(engine: EngineName) -> EngineRules:
    """The rules of an engine."""
    return _RULES[engine]


def module_of(engine: EngineName) -> str:
    """The module in which an engine trains: it imports torch, so that ranks alone import it, or what they are."""
    return f"hyperpod_ft.engines.{engine}.loop"
