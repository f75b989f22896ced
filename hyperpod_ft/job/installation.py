"""Installing pinned packages with pip into a virtual environment, and what went wrong when pip cannot.

The Neuron packages come from AWS's repository alone. PyPI has packages of the same names: with `--extra-index-url` pip
would choose among all indexes by version, so an upload to PyPI could take the place of AWS's (dependency confusion).
So there are two steps: first those pins with the named repositories as the only ones and without dependencies, then
everything with pip's own configuration, to which the first are there already.
"""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.pins import from_neuron_repositories, read_pins

# Printed without importing torch, whose CUDA build would miss libraries that are not installed yet.
_CUDA_OF_TORCH = """
import runpy
from importlib.util import find_spec
from pathlib import Path
values = runpy.run_path(str(Path(find_spec("torch").origin).with_name("version.py")))
print(values.get("cuda") or "")
"""
_NO_SPACE = re.compile(r"No space left on device|Disk quota exceeded")
_NOT_FOUND = re.compile(r"No matching distribution found for (\S+)")
_NOT_REACHED = re.compile(
    r"connection broken by|Could not fetch URL|\d{3} (Client|Server) Error|Location '.*' is ignored"
)
_INDEX_VARIABLES = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX")
_SETTING = "env.package_repositories"


def install(python: Path, pins: Path) -> None:
    """Install a requirements file with pip's own configuration. Raises UserError when pip cannot."""
    _pip(python, ("--requirement", str(pins)), "the package index")


def install_neuron(python: Path, pins: Path, repositories: Sequence[str]) -> None:
    """Install a requirements file, its Neuron packages and torch from `repositories`; see above.

    Without `repositories` pip's own configuration has to name them. Raises UserError when a repository is not reached
    or lacks a package, when the disk is full, or when torch turns out to be a CUDA build.
    """
    names = ", ".join(repositories) or "the indexes of pip's own configuration"
    first = from_neuron_repositories(read_pins(pins))
    _pip(python, ("--no-deps", *_sources(repositories), *first), names, alone=bool(repositories))
    if cuda := _output([str(python), "-c", _CUDA_OF_TORCH]):
        raise UserError(
            f"env: {names} gave a torch for CUDA {cuda}, gigabytes that a Neuron node has no use for",
            f"name PyTorch's index of CPU builds in {_SETTING}, beside AWS's Neuron repository",
        )
    install(python, pins)


def _sources(repositories: Sequence[str]) -> list[str]:
    directories = [place for place in repositories if place.startswith("/")]
    indexes = [place for place in repositories if not place.startswith("/")]
    options = ["--index-url", indexes[0]] if indexes else ["--no-index"] if repositories else []
    for index in indexes[1:]:
        options += ["--extra-index-url", index]
    for directory in directories:
        options += ["--find-links", directory]
    return options


def _pip(python: Path, arguments: Sequence[str], source: str, *, alone: bool = False) -> None:
    """`alone`: no other index than those of the arguments."""
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet"]
    environment = dict(os.environ)
    if alone:
        environment = {name: value for name, value in environment.items() if name not in _INDEX_VARIABLES}
        environment["PIP_CONFIG_FILE"] = os.devnull
    done = subprocess.run([*pip, *arguments], stderr=subprocess.PIPE, text=True, check=False, env=environment)
    if done.returncode:
        print(done.stderr, file=sys.stderr, flush=True)
        raise failure(done.stderr, source)


def failure(messages: str, source: str) -> UserError:
    """The one line that pip's messages come to; `source` is where it was to look."""
    if _NO_SPACE.search(messages):
        return UserError("pip install failed: no space left", "free the volume, or the directory TMPDIR names")
    missing = _NOT_FOUND.search(messages)
    if unreached := _NOT_REACHED.search(messages):
        return UserError(
            f"pip install failed: {source} not reached: {_line_of(messages, unreached)}",
            f"check the network, a proxy, and {_SETTING}, then resume",
        )
    if missing:
        return UserError(
            f"pip install failed: {missing[1]} is not in {source}",
            f"check {_SETTING}: AWS's Neuron repository, and PyTorch's index of CPU builds for torch",
        )
    lines = [line for line in messages.splitlines() if line.strip()] or ["no message"]
    return UserError(f"pip install failed: {lines[-1]}", "check the network and the package index, then resume")


def _line_of(messages: str, found: re.Match[str]) -> str:
    begin = messages.rfind("\n", 0, found.start()) + 1
    end = messages.find("\n", found.end())
    return messages[begin : end if end >= 0 else len(messages)].strip()[:300]


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
