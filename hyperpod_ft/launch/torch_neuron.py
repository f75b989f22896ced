"""Where TorchNeuron can come from on this machine: AWS's machine image, or packages for its system."""

import platform
import re
from pathlib import Path

from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.planning.engine_rules import rules_of

_IMAGES_ENVIRONMENTS = "aws_neuronx_venv_torch_neuronx_*/bin/python"  # in /opt, in AWS's machine images
_SYSTEM, _RELEASE = "ubuntu", (26, 4)  # of which Neuron 2.33's packages of TorchNeuron are
REMEDY = (
    "set env.container to AWS's image for TorchNeuron, or env.python to an interpreter with it (docs/engines.md), or"
    " engine to neuron"
)


def of_machine_image(directory: Path = Path("/opt")) -> Path | None:
    """The interpreter of TorchNeuron's environment in AWS's machine images (DLAMI), the newest; None elsewhere."""
    found = sorted(directory.glob(_IMAGES_ENVIRONMENTS), key=lambda path: [*map(int, re.findall(r"\d+", str(path)))])
    return found[-1] if found else None


def is_installed_for(config: RunConfig) -> bool:
    """Whether stage env would install TorchNeuron's packages for this run."""
    given = config.env.python or config.env.container
    return rules_of(config.engine).environment_name(config) == "torch-neuron" and not given


def problem_here(config: RunConfig) -> str:
    """Why stage env cannot install them here; empty if it can, or if its nodes are not those of the training."""
    return system_problem() if is_installed_for(config) and not config.cluster.cpu_partition else ""


def system_problem() -> str:
    """Why the packages cannot be used on this machine; empty if they can, or it has another source of them."""
    try:
        system = platform.freedesktop_os_release()
    except OSError:
        return ""
    release = tuple(int(number) for number in re.findall(r"\d+", system.get("VERSION_ID", ""))[:2])
    if of_machine_image() or (system["ID"] == _SYSTEM and release >= _RELEASE):
        return ""
    return f"this machine has {system['PRETTY_NAME']}, and TorchNeuron's packages are for Ubuntu 26.04"
