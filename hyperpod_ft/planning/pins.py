"""The pinned packages of each Python environment: a file in pins/ for each."""

import re
from functools import cache
from pathlib import Path

from hyperpod_ft.shipped import PACKAGE

_DIRECTORY = PACKAGE / "pins"
# Only AWS's repository has these; the packages of the same names on PyPI are empty. torch, because its Linux build on
# PyPI is for CUDA.
_NEURON_REPOSITORIES = {"libneuronxla", "neuronx-cc", "neuronx-distributed", "nki", "torch", "torch-neuronx"}

EVALUATION_ENVIRONMENT = "lm-eval"  # what evaluation adds to a run's environment

# Those that have packages, by kind of environment, the preferred first; any for others. optimum-neuron 0.4.5;
# torch-neuronx 2.13 (release notes of Neuron 2.33); TRL 1.16.
PYTHON_VERSIONS = {
    "neuron": ("3.11", "3.10"),
    "torch-neuron": ("3.12", "3.13", "3.14"),
    "trl": ("3.12", "3.11", "3.13", "3.14"),
}

# The releases of torch that engine torch accepts of `env.python` and of an image's environment: from which on, by what
# needs it (TorchNeuron: release notes of Neuron 2.33; experts: FSDP2 takes parameters of several meshes), and the
# newest that was tested. A newer one is noted.
TORCH_FROM = {"engine torch": (2, 11), "TorchNeuron": (2, 13), "sharding divided experts": (2, 12)}
TORCH_TESTED = (2, 14)

# The driver that AWS released with the SDK of each environment ("Release Content" of Neuron 2.26.1, 2.28.0, 2.33.0).
NEURON_DRIVERS = {"neuron-2.26.1": "2.24.7.0", "neuron-2.28.0": "2.26.5.0", "torch-neuron": "2.31.7.0"}


def environment_kind(environment: str) -> str:
    """The name of an environment without its version."""
    return re.sub(r"-\d.*", "", environment)


def pins_file(environment: str) -> Path:
    """The requirements file of an environment, for pip."""
    return _DIRECTORY / f"{environment}.txt"


@cache
def requirements(environment: str) -> tuple[str, ...]:
    """The pins of an environment; its fingerprint depends on them."""
    return read_pins(pins_file(environment))


def read_pins(file: Path) -> tuple[str, ...]:
    """The lines of a requirements file, without comments."""
    lines = (line.split("#")[0].strip() for line in file.read_text(encoding="utf-8").splitlines())
    return tuple(line for line in lines if line)


def from_neuron_repositories(pins: tuple[str, ...]) -> tuple[str, ...]:
    """The pins that must be installed from `env.package_repositories`."""
    return tuple(pin for pin in pins if re.split(r"[\[=<>~ ;]", pin)[0] in _NEURON_REPOSITORIES)
