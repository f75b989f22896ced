"""Interpreters: the kit's own, one found on the node, or one of uv; environments made with them, and what they have."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hyperpod_ft.config.sections.cluster import PythonEnvironment
from hyperpod_ft.errors import UserError, last_line
from hyperpod_ft.launch import container
from hyperpod_ft.planning.pins import PYTHON_VERSIONS, TORCH_FROM, TORCH_TESTED

# Of 1e9 bytes. The packages take about half of it; pip unpacks next to what it installs.
ENVIRONMENT_GB = 10
_SITE_PACKAGES = "import site; print(*site.getsitepackages(), sep=chr(10))"
_SUITABLE = "import ensurepip, sys; print('%d.%d' % sys.version_info[:2])"


def create_with(python: Path, environment: Path) -> None:
    """Create a virtual environment of an interpreter; with uv where it lacks ensurepip.

    HyperPod's images have a Python without ensurepip. Raises UserError when there is no uv either.
    """
    if version_of(str(python)):
        _create([str(python), "-m", "venv", str(environment)])
    elif uv := shutil.which("uv"):
        _create([uv, "venv", "--quiet", "--seed", "--python", str(python), str(environment)])
    else:
        raise UserError(
            f"env: {python} has no ensurepip on this node, and there is no uv",
            "install uv into the kit's environment: pip install uv",
        )


def create_environment(environment: Path, shared: Path, versions: tuple[str, ...]) -> None:
    """Create a virtual environment with a Python of one of these versions.

    A Python that uv must download is stored in `shared`, because every node uses it. Raises UserError when there is
    no suitable Python, or too little free space.
    """
    free = shutil.disk_usage(environment.parent).free / 1e9
    if free < ENVIRONMENT_GB:
        raise UserError(
            f"{environment.parent}: {free:.1f} GB free; such an environment needs {ENVIRONMENT_GB} GB",
            "free space, or set cluster.root to a larger volume",
        )
    if python := find(versions):
        _create([python, "-m", "venv", str(environment)])
    elif uv := shutil.which("uv"):
        settings = {"UV_PYTHON_INSTALL_DIR": str(shared / "python"), "UV_PYTHON_PREFERENCE": "only-managed"}
        _create([uv, "venv", "--quiet", "--seed", "--python", versions[0], str(environment)], settings)
    else:
        raise UserError(
            f"env: no Python {' or '.join(versions)} with ensurepip on this node, and no uv to install one",
            "install one on every node, or uv on this one, or set env.python to one with the packages",
        )


def create_on_top_of(base: Path, environment: Path) -> None:
    """Create a virtual environment that also has the packages of `base`, the interpreter of another one.

    That one may have been made on top of a third. Raises UserError as `create_with` does.
    """
    create_with(base, environment)
    done = subprocess.run([base, "-c", _SITE_PACKAGES], capture_output=True, text=True, check=True)
    # unlike a plain path, addsitedir reads the .pth files there, which may lead to further packages
    lines = "".join(f"import site; site.addsitedir({path!r})\n" for path in done.stdout.splitlines())
    for site_packages in environment.glob("lib/python*/site-packages"):
        (site_packages / "base.pth").write_text(lines, encoding="utf-8")


def move_scripts(partial: Path, final: Path) -> None:
    """Prepare an environment that is renamed next: its console scripts contain the absolute path of its interpreter."""
    for script in (partial / "bin").iterdir():
        content = script.read_bytes() if script.is_file() and not script.is_symlink() else b""
        if content.startswith(b"#!") or script.name.startswith("activate"):
            script.write_bytes(content.replace(str(partial).encode(), str(final).encode()))


def find(versions: tuple[str, ...]) -> str | None:
    """The running interpreter, or one on PATH, of one of these versions and with ensurepip."""
    for candidate in (sys.executable, *(shutil.which(f"python{version}") for version in versions)):
        if candidate and version_of(candidate) in versions:
            return candidate
    return None


def version_of(python: str) -> str:
    """`3.11`, of an interpreter that has ensurepip; empty for any other."""
    # it may be only a shim, or lack ensurepip, which is a separate package on Debian
    try:
        done = subprocess.run([python, "-c", _SUITABLE], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _create(command: list[str], environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        command, stderr=subprocess.PIPE, text=True, check=False, env={**os.environ, **(environment or {})}
    )
    if done.returncode:
        print(done.stderr, file=sys.stderr, flush=True)
        message = last_line(done.stderr) or "no error message"
        raise UserError(f"{Path(command[0]).name} venv failed: {message}", "see the lines above")


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


def probe(python: Path, imports: tuple[str, ...], remedy: str, inside: Sequence[str] = ()) -> dict[str, Any]:
    """Versions of Python, of torch's CUDA and of every package of an interpreter, after importing `imports` in it.

    `inside`: what runs it in a container. Raises UserError when the interpreter is missing, or, with the `remedy`,
    cannot import them.
    """
    # the kit's code is on PYTHONPATH; -P would need Python 3.11
    try:
        done = subprocess.run(
            [*inside, str(python), "-c", _PROBE, *imports], capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise UserError(f"env.python: cannot run {python}: {error.strerror}", "correct it, or remove it") from error
    if done.returncode:
        said = container.telling(done.stderr) if inside else last_line(done.stderr)
        reason = said or f"no error message, exit status {done.returncode} (negative: a signal)"
        raise UserError(f"env: {python} cannot import {', '.join(imports)}: {reason}", remedy)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def check_torch(
    python: Path, found: dict[str, Any], env: PythonEnvironment, *, neuron: bool, sharded_experts: bool
) -> None:
    """Raise UserError unless what `probe` found in an interpreter has a torch that engine torch can use.

    `neuron`: it must be TorchNeuron's, whose torch-neuronx has torch's own version. Older ones are the plugin of
    PyTorch/XLA, under the same name. `sharded_experts`: experts are divided, and their state is sharded. A torch newer
    than any that was tested is noted. `env`: what the run file says.
    """
    torch, plugin = (found["packages"].get(name, "none") for name in ("torch", "torch-neuronx"))
    release, versions = tuple(map(int, re.findall(r"\d+", torch)[:2])), PYTHON_VERSIONS["torch-neuron"]
    remedy = "set env.python to another interpreter" + (", or leave it out" if env.python else "")
    if env.container:
        remedy = f"set env.container to another image than {env.container}" + (
            ", or correct env.python" * bool(env.python)
        )
    if neuron and found["python"].rpartition(".")[0] not in versions:
        problem = f"has Python {found['python']}, and TorchNeuron needs {' or '.join(versions)}"
        raise UserError(f"env: {python} {problem}", remedy)
    for purpose in ["TorchNeuron" if neuron else "engine torch"] + ["sharding divided experts"] * sharded_experts:
        if release < TORCH_FROM[purpose]:
            others = ", or set parallelism.sharding to replicated or zero1" if purpose.startswith("sharding") else ""
            problem = f"has torch {torch}, and {purpose} needs {_text(TORCH_FROM[purpose])} or newer"
            raise UserError(f"env: {python} {problem}", remedy + others)
    if neuron and plugin.split(".")[:2] != torch.split(".")[:2]:
        problem = f"has torch {torch} and torch-neuronx {plugin}, which are different versions"
        raise UserError(f"env: {python} {problem}", remedy)
    if release > TORCH_TESTED:
        print(f"env: note: torch {torch} is newer than {_text(TORCH_TESTED)}, the newest that was tested", flush=True)


def _text(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))
