"""Stage `env`: the Python environment of the stages that need torch.

    python -m hyperpod_ft.stages.env RUN_DIR

Runs with the kit's own interpreter. With `env.python` it checks that interpreter; otherwise it builds a virtual
environment below `cluster.root` from the engine's pins. Host packages and drivers are never touched.
"""

import json
import platform
import subprocess
from pathlib import Path
from typing import Any

from hyperpod_ft import publish
from hyperpod_ft.config.run_config import EngineName
from hyperpod_ft.errors import UserError, last_line
from hyperpod_ft.job import interpreters, neuron_devices
from hyperpod_ft.job.installation import install, install_neuron
from hyperpod_ft.planning.pins import environment_name, pins_file
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages import stage

# Imported by the kit's own code in the jobs.
_KIT = ("pydantic", "yaml", "numpy", "xxhash", "threadpoolctl", "tiktoken", "transformers", "peft", "safetensors")
_IMPORTS = {
    "torch": ("torch", *_KIT),
    # on PyPI, packages of these names are empty
    "neuron": (
        *_KIT,
        *("torch", "neuronxcc", "libneuronxla", "torch_neuronx", "neuronx_distributed", "optimum.neuron"),
    ),
}

# Runs in the environment: tests the imports, and lists the packages for the record.
_PROBE = """
import importlib, json, platform, sys
from importlib import metadata
for name in sys.argv[1:]:
    importlib.import_module(name)
packages = {d.metadata["Name"]: d.version for d in metadata.distributions()}
cuda = sys.modules["torch"].version.cuda if "torch" in sys.modules else None
found = {"python": platform.python_version(), "cuda": cuda, "packages": dict(sorted(packages.items()))}
print(json.dumps(found))
"""


def work(run: Run) -> stage.Result:
    engine, outputs = run.config.engine, []
    if run.config.env.python is None:
        build(pins_file(environment_name(run.config)), run.environment, engine, run.config.env.package_repositories)
        outputs = [run.environment / "pyvenv.cfg"]
    found = probe(run.python, _IMPORTS[engine], _remedy(run))
    print(f"env: {run.python}, Python {found['python']}, {len(found['packages'])} packages", flush=True)
    facts: dict[str, Any] = {"interpreter": str(run.python), **found}
    if engine == "neuron":
        if found["cuda"]:  # only with env.python: an environment built here has a CPU build
            print(f"env: note: its torch is a CUDA {found['cuda']} build, which Neuron nodes cannot use", flush=True)
        facts["neuron_devices"] = _neuron_devices()
    return stage.Result(outputs, facts)


def build(pins: Path, environment: Path, engine: EngineName = "torch", repositories: tuple[str, ...] = ()) -> None:
    """Create a virtual environment at `environment` with the packages of the requirements file `pins`.

    Raises UserError when there is no suitable interpreter, or pip cannot install the packages.
    """
    print(f"env: installing {pins.name} into {environment}; this takes a few minutes", flush=True)
    with publish.new_directory(environment) as partial:
        if engine == "neuron":
            interpreters.create_environment(partial, environment.parent)
            install_neuron(partial / "bin" / "python", pins, repositories)
        else:
            interpreters.create_like_this_one(partial)
            install(partial / "bin" / "python", pins)
        _move_scripts(partial, environment)


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


def _remedy(run: Run) -> str:
    """How to correct failed imports."""
    if run.config.engine == "torch":
        return "install the `torch` extra there (pip install 'hyperpod-ft[torch]'), or remove env.python"
    if run.config.env.python:
        return "install the Neuron packages there, or remove env.python"
    return "name AWS's Neuron repository in env.package_repositories: packages of these names on PyPI are empty"


def _neuron_devices() -> list[dict[str, Any]] | None:
    """The devices, for the record; None without `neuron-ls`, as on most head nodes."""
    program = neuron_devices.neuron_ls()
    if program is None:
        print(f"env: no neuron-ls on {platform.node()}; the health check before training reads the devices", flush=True)
        return None
    found = neuron_devices.devices(program)
    print(f"env: {program} sees {len(found)} Neuron devices on {platform.node()}", flush=True)
    return found


def _move_scripts(partial: Path, final: Path) -> None:
    # console scripts contain the absolute path of their interpreter, which is renamed next
    for script in (partial / "bin").iterdir():
        content = script.read_bytes() if script.is_file() and not script.is_symlink() else b""
        if content.startswith(b"#!") or script.name.startswith("activate"):
            script.write_bytes(content.replace(str(partial).encode(), str(final).encode()))


if __name__ == "__main__":
    stage.main("env", work)
