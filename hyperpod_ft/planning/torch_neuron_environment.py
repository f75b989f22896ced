"""Environment variables of engine torch's jobs that compile and train on Trainium: a pure function of the run file.

Sources: AWS's documentation of Neuron 2.33, "TorchNeuron environment variables", and for the caches torch-neuronx's own
code. They must be set before torch is imported, which loads torch-neuronx.
"""

import hashlib
from pathlib import Path

from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.planning.neuron_environment import node_settings

_COMPILER_VARIABLES = ("NEURON_", "TORCH_NEURONX_")


def variables(config: RunConfig, cache: Path) -> dict[str, str]:
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


def graph_settings(config: RunConfig) -> dict[str, str]:
    """The variables that change the compiled graphs."""
    given = config.cluster.environment
    chosen = {name: value for name, value in node_settings(config).items() if name.startswith(_COMPILER_VARIABLES)}
    return chosen | {name: value for name, value in given.items() if name.startswith(_COMPILER_VARIABLES)}
