"""Assumptions about programs: the kit's interpreter, virtual environments, and the packages of stage env."""

import os
import platform
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.doctor.assumed import Assumed
from hyperpod_ft.doctor.diagnosis import Assumption, Diagnosis, differs, ok, unknown
from hyperpod_ft.job import interpreters
from hyperpod_ft.job.installation import why_not_found
from hyperpod_ft.planning.pins import PYTHON_VERSIONS, environment_kind, from_neuron_repositories, requirements

_OTHERS = ("torch", "transformers", "optimum-neuron")  # stand for what comes from pip's usual index


def assumptions(assumed: Assumed) -> list[Assumption]:
    return [
        Assumption("kit", lambda: _kit(assumed)),
        Assumption("virtual environment", lambda: _environment(assumed)),
        Assumption("packages", lambda: _packages(assumed)),
    ]


def _kit(assumed: Assumed) -> Diagnosis:
    """Jobs use the interpreter that submitted them, on every node."""
    where = f"Python {platform.python_version()} at {sys.prefix}"
    if Path(sys.prefix).stat().st_dev == assumed.writable.stat().st_dev:
        return ok("kit", f"{where}, on the volume of {assumed.writable}")
    return unknown("kit", f"{where}, on another volume than {assumed.writable}", "see whether nodes have it: --nodes")


def _environment(assumed: Assumed) -> Diagnosis:
    """Stage env can make a virtual environment, or the given interpreter exists."""
    row, config = "virtual environment", assumed.config
    if config and config.env.python:
        if os.access(config.env.python, os.X_OK):
            return ok(row, f"env.python: {config.env.python}")
        return differs(row, f"env.python: cannot run {config.env.python}", "correct it, or leave it out")
    kind = environment_kind(assumed.environment_name or "torch")
    if kind == "torch-neuron" and (image := interpreters.torch_neuron_of_image()):
        return ok(row, f"TorchNeuron of the image: {image}")
    versions = PYTHON_VERSIONS.get(kind, (_this_python(),))
    if found := interpreters.find(versions):
        return ok(row, f"{found} can make them")
    wanted = f"no Python {' or '.join(versions)} with ensurepip on this machine"
    if uv := shutil.which("uv"):
        return ok(row, f"{wanted}; {uv} makes them")
    return differs(row, f"{wanted}, and no uv", "install uv into the kit's environment: pip install uv")


def _packages(assumed: Assumed) -> Diagnosis:
    """The indexes answer and have the pinned versions, for the interpreter that the environment will have."""
    config, name = assumed.config, assumed.environment_name
    if config is None:
        return unknown("packages", "which ones depends on the engine", "give a run file")
    if name is None:
        return ok("packages", "env.python has its own; stage env imports them")
    return _pinned(config, name)


def _pinned(config: RunConfig, name: str) -> Diagnosis:
    kind, pins, repositories = environment_kind(name), requirements(name), config.env.package_repositories
    version = next(iter(PYTHON_VERSIONS.get(kind, (_this_python(),))))
    if kind != "torch" and (found := interpreters.find(PYTHON_VERSIONS[kind])):
        version = interpreters.version_of(found)
    neuron = () if kind == "torch" else from_neuron_repositories(pins)
    if kind == "torch-neuron" and interpreters.torch_neuron_of_image():
        neuron = ()
    others = [pin for pin in pins if pin not in neuron and pin.partition("=")[0].partition("[")[0] in _OTHERS]
    remedy = "check the network and env.package_repositories: AWS's Neuron repository, PyTorch's index of CPU builds"
    with ThreadPoolExecutor() as pool:
        missing = [*filter(None, pool.map(lambda pin: why_not_found(pin, repositories, version), neuron))]
        missing += filter(None, pool.map(lambda pin: why_not_found(pin, (), version), others))
    if missing:
        return differs("packages", ", ".join(dict.fromkeys(missing)), remedy)
    return ok("packages", f"found for Python {version}: {', '.join(pin.split(' ')[0] for pin in (*neuron, *others))}")


def _this_python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"
