"""What packages an interpreter has, and whether it can import those that a job needs."""

import json
import subprocess
from pathlib import Path
from typing import Any

from hyperpod_ft.errors import UserError, last_line
from hyperpod_ft.planning.pins import PYTHON_VERSIONS

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
