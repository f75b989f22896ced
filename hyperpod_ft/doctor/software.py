"""Checks of programs: the kit's interpreter, virtual environments, and the packages of stage env."""

import os
import platform
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.doctor.check import DoctorCheck, Expectations
from hyperpod_ft.environments import interpreters
from hyperpod_ft.environments.installation import why_not_found
from hyperpod_ft.findings import Finding, error, ok, warning
from hyperpod_ft.launch import torch_neuron
from hyperpod_ft.planning.pins import (
    EVALUATION_ENVIRONMENT,
    PYTHON_VERSIONS,
    environment_kind,
    from_neuron_repositories,
    requirements,
)

_OTHERS = ("torch", "transformers", "optimum-neuron", "lm-eval", "vllm")  # stand for what comes from pip's usual index


def checks(expected: Expectations) -> list[DoctorCheck]:
    return [
        DoctorCheck("kit", lambda: _kit(expected)),
        DoctorCheck("virtual environment", lambda: _environment(expected)),
        DoctorCheck("packages", lambda: _packages(expected)),
    ]


def _kit(expected: Expectations) -> Finding:
    """Jobs use the interpreter that submitted them, on every node."""
    where = f"Python {platform.python_version()} at {sys.prefix}"
    if Path(sys.prefix).stat().st_dev == expected.writable.stat().st_dev:
        return ok("kit", f"{where}, on the volume of {expected.writable}")
    return warning("kit", f"{where}, on another volume than {expected.writable}", "see whether nodes have it: --nodes")


def _environment(expected: Expectations) -> Finding:
    """Stage env can make a virtual environment, or the given interpreter exists."""
    row, config = "virtual environment", expected.config
    if expected.container:
        return ok(row, f"made in the container {expected.container}")
    if config and config.env.python:
        if os.access(config.env.python, os.X_OK):
            return ok(row, f"env.python: {config.env.python}")
        return error(row, f"env.python: cannot run {config.env.python}", "correct it, or leave it out")
    kind = environment_kind(expected.environment_name or "torch")
    if kind == "torch-neuron" and (image := torch_neuron.of_machine_image()):
        return ok(row, f"TorchNeuron of the image: {image}")
    if config and (problem := torch_neuron.problem_here(config)):
        return error(row, problem, torch_neuron.REMEDY)
    versions = PYTHON_VERSIONS.get(kind, (_this_python(),))
    if found := interpreters.find(versions):
        return ok(row, f"{found} can make them")
    wanted = f"no Python {' or '.join(versions)} with ensurepip on this machine"
    if uv := shutil.which("uv"):
        return ok(row, f"{wanted}; {uv} makes them")
    return error(row, f"{wanted}, and no uv", "install uv into the kit's environment: pip install uv")


def _packages(expected: Expectations) -> Finding:
    """The indexes answer and have the pinned versions, for the interpreter that the environment will have."""
    config, name = expected.config, expected.environment_name
    if config is None:
        return warning("packages", "which ones depends on the engine", "give a run file")
    # stage tasks makes the second, with env.python too
    evaluation = EVALUATION_ENVIRONMENT if config.eval and config.eval.python is None else None
    names = [made for made in (name, evaluation) if made]
    if expected.container:
        return warning("packages", "stage env installs in the container what the image lacks")
    if not names:
        return ok("packages", "env.python has its own; stage env imports them")
    pins = tuple(pin for made in names for pin in requirements(made))
    return _pinned(config, environment_kind(name) if name else "torch", pins)


def _pinned(config: RunConfig, kind: str, pins: tuple[str, ...]) -> Finding:
    repositories = config.env.package_repositories
    version = next(iter(PYTHON_VERSIONS.get(kind, (_this_python(),))))
    if kind in PYTHON_VERSIONS and (found := interpreters.find(PYTHON_VERSIONS[kind])):
        version = interpreters.version_of(found)
    neuron = () if "neuron" not in kind else from_neuron_repositories(pins)
    if kind == "torch-neuron" and torch_neuron.of_machine_image():
        neuron = ()
    others = [pin for pin in pins if pin not in neuron and pin.partition("=")[0].partition("[")[0] in _OTHERS]
    remedy = "check the network and env.package_repositories: AWS's Neuron repository, PyTorch's index of CPU builds"
    with ThreadPoolExecutor() as pool:
        missing = [*filter(None, pool.map(lambda pin: why_not_found(pin, repositories, version), neuron))]
        missing += filter(None, pool.map(lambda pin: why_not_found(pin, (), version), others))
    if missing:
        return error("packages", ", ".join(dict.fromkeys(missing)), remedy)
    return ok("packages", f"found for Python {version}: {', '.join(pin.split(' ')[0] for pin in (*neuron, *others))}")


def _this_python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"
