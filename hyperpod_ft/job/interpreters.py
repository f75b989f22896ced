"""Virtual environments, and the interpreters they are made of: the kit's own, one found on the node, or one of uv's."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from hyperpod_ft.errors import UserError

# optimum-neuron 0.4.5: >=3.10,<3.12
NEURON_VERSIONS = ("3.11", "3.10")
# Torch, the compiler and the rest take about half of it; pip unpacks beside what it installs.
NEURON_DISK_GB = 10
_SUITABLE = "import ensurepip, sys; print('%d.%d' % sys.version_info[:2])"


def create_like_this_one(environment: Path) -> None:
    """A virtual environment of the running interpreter."""
    _create([sys.executable, "-m", "venv", str(environment)])


def create_environment(environment: Path, shared: Path, disk_gb: float = NEURON_DISK_GB) -> None:
    """A virtual environment with a Python that optimum-neuron runs on.

    One that uv has to fetch lies in `shared`, since every node uses it. Raises UserError when there is none, or less
    than `disk_gb` (1e9 bytes) of room.
    """
    free = shutil.disk_usage(environment.parent).free / 1e9
    if free < disk_gb:
        raise UserError(
            f"{environment.parent}: {free:.1f} GB are free, and building a Neuron environment takes {disk_gb:g} GB",
            "free some, or set cluster.root to a larger volume",
        )
    if python := find(NEURON_VERSIONS):
        _create([python, "-m", "venv", str(environment)])
    elif uv := shutil.which("uv"):
        settings = {"UV_PYTHON_INSTALL_DIR": str(shared / "python"), "UV_PYTHON_PREFERENCE": "only-managed"}
        _create([uv, "venv", "--quiet", "--seed", "--python", NEURON_VERSIONS[0], str(environment)], settings)
    else:
        raise UserError(
            f"env: no Python {' or '.join(NEURON_VERSIONS)} that can make environments here, and no uv to fetch one",
            "install one on every node, or uv here, or set env.python to an interpreter that has the Neuron packages",
        )


def find(versions: tuple[str, ...]) -> str | None:
    """The running interpreter or one on PATH that is of one of these versions and can make environments."""
    for candidate in (sys.executable, *(shutil.which(f"python{version}") for version in versions)):
        if candidate and _version(candidate) in versions:
            return candidate
    return None


def _version(python: str) -> str:
    # one may be there as a name only (a shim), or without ensurepip, which Debian packages apart
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
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        raise UserError(f"{Path(command[0]).name} venv failed: {lines[-1]}", "see the lines above")
