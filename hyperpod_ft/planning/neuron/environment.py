"""Environment variables of the jobs that compile and train on Neuron devices: a pure function of the run file.

Engine neuron's values are those of Hugging Face's and AWS's fine-tuning scripts for optimum-neuron, unless a comment
says why not. Engine torch's are from AWS's documentation of Neuron 2.33, "TorchNeuron environment variables", and for
the caches from torch-neuronx's own code; they must be set before torch is imported, which loads torch-neuronx.
"""

import hashlib
import re
from pathlib import Path

from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.errors import UserError

NEURON_TOOLS = Path("/opt/aws/neuron/bin")
_COMPILER_VARIABLES = ("NEURON_", "TORCH_NEURONX_")


def variables(config: RunConfig, cache: Path) -> dict[str, str]:
    """The variables that the scripts export, except those that `cluster.environment` sets.

    The cache's directory is always added to NEURON_CC_FLAGS: without it, optimum-neuron looks for compiled graphs on
    each node's local disk.
    """
    given = config.cluster.environment
    chosen = {name: value for name, value in _defaults(config).items() if name not in given}
    flags = given.get("NEURON_CC_FLAGS") or " ".join(_compiler_flags(config))
    return chosen | {
        "NEURON_CC_FLAGS": " ".join([flags, *_grouping(config), f"--cache_dir={cache}"]),
        "NEURON_COMPILE_CACHE_URL": str(cache),
    }


def graph_settings(config: RunConfig) -> dict[str, str]:
    """The variables that change the compiled graphs, without the cache's directory."""
    given = {name: value for name, value in config.cluster.environment.items() if name.startswith(("NEURON_", "XLA_"))}
    defaults = {name: value for name, value in _defaults(config).items() if name.startswith("NEURON_")}
    return {"NEURON_CC_FLAGS": " ".join(_compiler_flags(config))} | defaults | given


def _compiler_flags(config: RunConfig) -> list[str]:
    flags = [
        "--model-type transformer",
        # the mask's infinities become the largest finite numbers; they would become NaN
        "--enable-saturate-infinity",
        # an earlier failure may have been lack of memory or a kill
        "--retry_failed_compilation",
    ]
    if config.neuron.zero_1:
        flags.append("--distribution-strategy=llm-training")
    return flags


def _grouping(config: RunConfig) -> list[str]:
    """Must agree with the runtime's setting in `_defaults`, even if the user sets other flags."""
    lnc = config.instance.cores_per_rank
    return [f"--lnc={lnc}"] if lnc > 1 else []


def _defaults(config: RunConfig) -> dict[str, str]:
    rounding = config.neuron.stochastic_rounding and config.training.precision == "bf16"
    found = {
        "NEURON_FUSE_SOFTMAX": "1",
        "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": "3",
        "NEURON_RT_STOCHASTIC_ROUNDING_EN": str(int(rounding)),
        # the same on all ranks, so that copies of a value are rounded alike
        "NEURON_RT_STOCHASTIC_ROUNDING_SEED": "0",
    }
    return found | node_settings(config)


def node_settings(config: RunConfig) -> dict[str, str]:
    """The variables that depend on the nodes alone, for both engines."""
    instance = config.instance
    # with an arena for each of many threads, glibc would use tens of GB of host memory
    found = {"MALLOC_ARENA_MAX": "64"}
    if instance.cores_per_rank > 1:
        # must agree with the compiler's --lnc
        found["NEURON_LOGICAL_NC_CONFIG"] = str(instance.cores_per_rank)
        found["NEURON_RT_VIRTUAL_CORE_SIZE"] = str(instance.cores_per_rank)
    if config.cluster.nodes > 1 and instance.efa:
        found |= {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "FI_EFA_FORK_SAFE": "1"}
    return found


def check_grouping(config: RunConfig) -> None:
    """Raise UserError where the run file groups cores itself, with either engine."""
    given = config.cluster.environment
    grouping = {"NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE"} & given.keys()
    if grouping or re.search(r"--(lnc|logical.nc.config)\b", given.get("NEURON_CC_FLAGS", "")):
        raise UserError(
            "cluster.environment: the kit sets how NeuronCores are grouped (LNC), by the instance type", "leave it out"
        )


def torch_variables(config: RunConfig, cache: Path) -> dict[str, str]:
    """The variables that the scripts export, except those that `cluster.environment` sets.

    Compiled graphs are kept in `cache`. Locks and intermediate files stay on the node, in directories for this cache
    alone: the defaults are the same for all users of a node, and only the first could write there.
    """
    digest = hashlib.sha256(bytes(cache)).hexdigest()[:12]
    local = Path("/tmp") / f"hyperpod-ft-{digest}"  # noqa: S108 - a shared volume may have no file locks
    chosen = {name: value for name, value in node_settings(config).items() if name not in config.cluster.environment}
    return chosen | {
        "TORCH_NEURONX_NEFF_CACHE_DIR": str(cache),
        "TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR": str(local / "locks"),
        "TORCH_NEURONX_DEBUG_DIR": str(local / "compiler"),
    }


def torch_graph_settings(config: RunConfig) -> dict[str, str]:
    """The variables that change the compiled graphs."""
    given = config.cluster.environment
    chosen = {name: value for name, value in node_settings(config).items() if name.startswith(_COMPILER_VARIABLES)}
    return chosen | {name: value for name, value in given.items() if name.startswith(_COMPILER_VARIABLES)}
