"""Stage `env`: the Python environment of the stages that need torch.

    python -m hyperpod_ft.stages.env RUN_DIR

Runs with the kit's own interpreter. With `env.python` it checks that interpreter; otherwise it builds a virtual
environment below `cluster.root` from the engine's pins. Host packages and drivers are never touched. In a training
job's container it checks the interpreter that the container has prepared.
"""

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hyperpod_ft import publish
from hyperpod_ft.errors import UserError, last_line
from hyperpod_ft.job import interpreters, neuron_devices
from hyperpod_ft.job.installation import install, install_neuron, install_others
from hyperpod_ft.planning.engine_rules import rules_of
from hyperpod_ft.planning.pins import PYTHON_VERSIONS, environment_kind, pins_file
from hyperpod_ft.processes import descendants
from hyperpod_ft.runs.container import CONTAINER_PYTHON
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages import stage

# How much longer than the stage itself the job may take for trackers: training waits for it.
_TRACKERS_SECONDS = 120

# Imported by the kit's own code in the jobs.
_KIT = ("pydantic", "yaml", "numpy", "xxhash", "threadpoolctl", "tiktoken", "transformers", "peft", "safetensors")

# Runs in the environment: tests the imports, and lists the packages for the record.
_PROBE = """
import gc, importlib, json, platform, sys
from importlib import metadata
gc.disable()  # see hyperpod_ft/gc_pause.py
for name in sys.argv[1:]:
    importlib.import_module(name)
gc.freeze()
packages = {}
for found in metadata.distributions():
    # of several, the first is the one that is imported
    packages.setdefault(found.metadata["Name"], found.version)
cuda = sys.modules["torch"].version.cuda if "torch" in sys.modules else None
found = {"python": platform.python_version(), "cuda": cuda, "packages": dict(sorted(packages.items()))}
print(json.dumps(found))
"""


def work(run: Run) -> stage.Result:
    config, rules, outputs = run.config, rules_of(run.config.engine), []
    if config.env.python is None and CONTAINER_PYTHON not in os.environ:
        pins = pins_file(rules.environment_name(config))
        build(pins, run.environment_path, environment_kind(pins.stem), config.env.package_repositories)
        outputs = [run.environment_path / "pyvenv.cfg"]
    found = probe(run.python, (*_KIT, *rules.imports(config)), rules.packages_remedy(config))
    print(f"env: {run.python}, Python {found['python']}, {len(found['packages'])} packages", flush=True)
    if config.engine == "torch" and "torch_neuronx" in rules.imports(config):
        check_torch_neuron(run.python, found)
    facts: dict[str, Any] = {"interpreter": str(run.python), **found}
    if config.instance.is_neuron:
        if found["cuda"]:  # only with env.python: an environment built here has a CPU build
            print(f"env: note: its torch is a CUDA {found['cuda']} build, which Neuron nodes cannot use", flush=True)
        facts["neuron_devices"] = _neuron_devices()
    return stage.Result(outputs, facts)


def build(pins: Path, environment: Path, kind: str = "torch", repositories: tuple[str, ...] = ()) -> None:
    """Create a virtual environment at `environment` with the packages of the requirements file `pins`.

    Raises UserError when there is no suitable interpreter, or pip cannot install the packages.
    """
    print(f"env: installing {pins.name} into {environment}; this takes a few minutes", flush=True)
    with publish.new_directory(environment) as partial:
        _BUILDERS[kind](partial, environment.parent, pins, repositories)
        interpreters.move_scripts(partial, environment)


def _build_torch(environment: Path, _: Path, pins: Path, __: tuple[str, ...]) -> None:
    interpreters.create_like_this_one(environment)
    install(environment / "bin" / "python", pins)


def _build_neuron(environment: Path, shared: Path, pins: Path, repositories: tuple[str, ...]) -> None:
    interpreters.create_environment(environment, shared, PYTHON_VERSIONS["neuron"])
    install_neuron(environment / "bin" / "python", pins, repositories)


def _build_torch_neuron(environment: Path, shared: Path, pins: Path, repositories: tuple[str, ...]) -> None:
    """On AWS's machine image with TorchNeuron, on top of its environment, which every node must then have."""
    if image := interpreters.torch_neuron_of_image():
        print(f"env: using TorchNeuron of {image}", flush=True)
        interpreters.create_on_top_of(image, environment)
        install_others(environment / "bin" / "python", pins)
        return
    interpreters.create_environment(environment, shared, PYTHON_VERSIONS["torch-neuron"])
    install_neuron(environment / "bin" / "python", pins, repositories)


_BUILDERS: dict[str, Callable[[Path, Path, Path, tuple[str, ...]], None]] = {
    "torch": _build_torch,
    "neuron": _build_neuron,
    "torch-neuron": _build_torch_neuron,
}


def check_torch_neuron(python: Path, found: dict[str, Any]) -> None:
    """Raise UserError unless what `probe` found in an interpreter is TorchNeuron, and all of it matches.

    Facts of the release notes of Neuron 2.33: Python 3.12 to 3.14, torch 2.13 or newer, and a torch-neuronx of torch's
    own version. Older ones are the plugin of PyTorch/XLA, under the same name.
    """
    torch, plugin = (found["packages"].get(name, "none") for name in ("torch", "torch-neuronx"))
    family, versions = torch.split(".")[:2], PYTHON_VERSIONS["torch-neuron"]
    if found["python"].rpartition(".")[0] not in versions:
        problem = f"has Python {found['python']}, and TorchNeuron needs {' or '.join(versions)}"
    elif [int(number) for number in family] < [2, 13]:
        problem = f"has torch {torch}, and TorchNeuron needs 2.13 or newer; older ones have PyTorch/XLA on Trainium"
    elif plugin.split(".")[:2] != family:
        problem = f"has torch {torch} and torch-neuronx {plugin}, which are different versions"
    else:
        return
    raise UserError(f"env: {python} {problem}", "set env.python to another interpreter, or leave it out")


def probe(python: Path, imports: tuple[str, ...], remedy: str) -> dict[str, Any]:
    """Versions of Python, of torch's CUDA and of every package of an interpreter, after importing `imports` in it.

    Raises UserError when the interpreter is missing, or, with the `remedy`, cannot import them.
    """
    # the kit's code is on PYTHONPATH; -P would need Python 3.11
    try:
        done = subprocess.run([str(python), "-c", _PROBE, *imports], capture_output=True, text=True, check=False)
    except OSError as error:
        raise UserError(f"env.python: cannot run {python}: {error.strerror}", "correct it, or remove it") from error
    if done.returncode:
        raise UserError(
            f"env: {python} cannot import {', '.join(imports)}: {last_line(done.stderr) or 'no error message'}", remedy
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _neuron_devices() -> list[dict[str, Any]] | None:
    """The devices, for the record; None without `neuron-ls`, as on most head nodes."""
    program = neuron_devices.neuron_ls()
    if program is None:
        print(f"env: no neuron-ls on {platform.node()}; the health check before training reads the devices", flush=True)
        return None
    found = neuron_devices.devices(program)
    print(f"env: {program} sees {len(found)} Neuron devices on {platform.node()}", flush=True)
    return found


def main() -> None:
    """Run the stage from the command line. Meanwhile a process installs what the run's trackers lack."""
    if CONTAINER_PYTHON in os.environ or len(sys.argv) != 2:
        stage.main("env", work)
        return
    installer = subprocess.Popen([sys.executable, "-m", "hyperpod_ft.stages.tracker_environments", sys.argv[1]])
    try:
        stage.main("env", work)
        installer.wait(_TRACKERS_SECONDS)
    except subprocess.TimeoutExpired:
        print(f"env: trackers are not installed within {_TRACKERS_SECONDS} s; the run continues without", flush=True)
    finally:
        for pid in [installer.pid, *descendants(installer.pid)] if installer.poll() is None else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        installer.wait()


if __name__ == "__main__":
    main()
