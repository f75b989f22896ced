"""Trainium as a device, with either engine: what the jobs of its nodes set in their environment."""

import re
from pathlib import Path

from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.errors import UserError

NEURON_TOOLS = Path("/opt/aws/neuron/bin")


def node_settings(config: RunConfig) -> dict[str, str]:
    """The variables that depend on the nodes alone."""
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
    """Raise UserError where the run file groups cores itself."""
    given = config.cluster.environment
    grouping = {"NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE"} & given.keys()
    if grouping or re.search(r"--(lnc|logical.nc.config)\b", given.get("NEURON_CC_FLAGS", "")):
        raise UserError(
            "cluster.environment: the kit sets how NeuronCores are grouped (LNC), by the instance type", "leave it out"
        )
