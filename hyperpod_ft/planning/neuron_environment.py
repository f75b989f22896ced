"""The environment variables of the jobs that compile and train on Neuron devices. A pure function of the run file.

The values are those of Hugging Face's and AWS's fine-tuning scripts for optimum-neuron, unless said otherwise.
"""

from pathlib import Path

from hyperpod_ft.config.instances import CATALOGUE
from hyperpod_ft.config.run_config import RunConfig


def variables(config: RunConfig, cache: Path) -> dict[str, str]:
    """What the scripts export; a variable of `cluster.environment` is left as it is there.

    Only the flags of the user's own NEURON_CC_FLAGS are joined with the cache's directory, without which optimum-neuron
    would look for compiled graphs on each node's own disk.
    """
    given = config.cluster.environment
    chosen = {name: value for name, value in _defaults(config).items() if name not in given}
    flags = given.get("NEURON_CC_FLAGS") or " ".join(_compiler_flags(config))
    return chosen | {
        "NEURON_CC_FLAGS": " ".join([flags, *_grouping(config), f"--cache_dir={cache}"]),
        "NEURON_COMPILE_CACHE_URL": str(cache),
    }


def graph_settings(config: RunConfig) -> dict[str, str]:
    """Those of the variables that change what is compiled, without where it is kept."""
    given = {name: value for name, value in config.cluster.environment.items() if name.startswith(("NEURON_", "XLA_"))}
    defaults = {name: value for name, value in _defaults(config).items() if name.startswith("NEURON_")}
    return {"NEURON_CC_FLAGS": " ".join(_compiler_flags(config))} | defaults | given


def _compiler_flags(config: RunConfig) -> list[str]:
    flags = [
        "--model-type transformer",
        # the mask's infinities become the largest finite numbers, before they become NaN
        "--enable-saturate-infinity",
        # an earlier failure may have been the node's memory or a kill
        "--retry_failed_compilation",
    ]
    if config.neuron.zero_1:
        flags.append("--distribution-strategy=llm-training")
    return flags


def _grouping(config: RunConfig) -> list[str]:
    """Has to agree with what the runtime is told, whatever other flags are given."""
    lnc = CATALOGUE[config.cluster.instance_type].cores_per_rank
    return [f"--lnc={lnc}"] if lnc > 1 else []


def _defaults(config: RunConfig) -> dict[str, str]:
    instance = CATALOGUE[config.cluster.instance_type]
    rounding = config.neuron.stochastic_rounding and config.training.precision == "bf16"
    found = {
        "NEURON_FUSE_SOFTMAX": "1",
        "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": "3",
        "NEURON_RT_STOCHASTIC_ROUNDING_EN": str(int(rounding)),
        # ranks that hold the same round it the same way
        "NEURON_RT_STOCHASTIC_ROUNDING_SEED": "0",
        # glibc's arenas, one for each of many threads, would take tens of GB of host memory
        "MALLOC_ARENA_MAX": "64",
    }
    if instance.cores_per_rank > 1:
        # must agree with the compiler's --lnc
        found["NEURON_LOGICAL_NC_CONFIG"] = str(instance.cores_per_rank)
        found["NEURON_RT_VIRTUAL_CORE_SIZE"] = str(instance.cores_per_rank)
    if config.cluster.nodes > 1 and instance.efa:
        found |= {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "FI_EFA_FORK_SAFE": "1"}
    return found
