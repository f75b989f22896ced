"""Create virtual environments with pinned packages, which pip installs, and explain its failures in one line.

The Neuron packages come only from AWS's repository. PyPI has packages of the same names: with `--extra-index-url`, pip
would choose among all indexes by version, so an upload to PyPI could replace AWS's package (dependency confusion).
So there are two steps: first those pins, from the named repositories only and without dependencies; then everything
with pip's own configuration, which finds the first ones installed.
"""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from hyperpod_ft import publish
from hyperpod_ft.environments import images, interpreters
from hyperpod_ft.errors import UserError, last_line
from hyperpod_ft.launch import torch_neuron
from hyperpod_ft.planning.pins import PYTHON_VERSIONS, from_neuron_repositories, read_pins

# Does not import torch: its CUDA build needs libraries that are not installed yet.
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


def install(python: Path, pins: Path, temporary: str = "") -> None:
    """Install a requirements file with pip's own configuration; `temporary`: where it unpacks, if not where usual.

    Raises UserError when pip cannot.
    """
    _pip(python, ("--requirement", str(pins)), "the package index", temporary=temporary)


def install_others(python: Path, pins: Path) -> None:
    """Install those packages of a requirements file that come from no Neuron repository; the others must be there."""
    lines = read_pins(pins)
    neuron = from_neuron_repositories(lines)
    _pip(python, [line for line in lines if line not in neuron], "the package index")


def install_neuron(python: Path, pins: Path, repositories: Sequence[str]) -> None:
    """Install a requirements file; its Neuron packages and torch come from `repositories`, see above.

    Without `repositories`, pip's own configuration must name them. Raises UserError when a repository cannot be
    reached or lacks a package, when the disk is full, or when torch is a CUDA build.
    """
    names = ", ".join(repositories) or "the indexes of pip's own configuration"
    first = from_neuron_repositories(read_pins(pins))
    _pip(python, ("--no-deps", *_sources(repositories), *first), names, alone=bool(repositories))
    if cuda := _output([str(python), "-c", _CUDA_OF_TORCH]):
        raise UserError(
            f"env: {names} provided a CUDA {cuda} build of torch, which Neuron nodes cannot use",
            f"add PyTorch's index of CPU builds to {_SETTING}, next to AWS's Neuron repository",
        )
    install(python, pins)


def why_not_found(pin: str, repositories: Sequence[str], python_version: str) -> str:
    """Why pip would not find a pinned package for a Python (`3.11`); empty if it would. Downloads no package.

    Searches `repositories` only, or where pip's own configuration says if there are none. Raises UserError when pip
    cannot search.
    """
    name, _, version = re.split(r"[ ;]", pin)[0].partition("==")
    name = name.partition("[")[0]
    search = ("--retries", "1", "--timeout", "10", "index", "versions", name, "--python-version", python_version)
    done = _run_pip(Path(sys.executable), (*search, *_sources(repositories)), alone=bool(repositories))
    source = ", ".join(repositories) or "the package index"
    if done.returncode and _NOT_REACHED.search(done.stderr):
        return f"cannot reach {source}"
    if done.returncode and _NOT_FOUND.search(done.stderr):
        return f"{name} for Python {python_version} is not in {source}"
    if done.returncode:
        raise failure(done.stderr, source)
    listed = re.search(r"^Available versions: (.*)$", done.stdout, re.MULTILINE)
    offered = listed[1].split(", ") if listed else []
    # a build for CPUs is 2.8.0+cpu, and one pin ends with `.*`
    wanted = re.compile(re.escape(version.removesuffix(".*")) + (r"(\.|\+|$)" if version.endswith(".*") else r"(\+|$)"))
    if any(wanted.match(one) for one in offered):
        return ""
    return f"{name} {version} for Python {python_version} is not in {source}, which has {', '.join(offered[:3])}"


def _sources(repositories: Sequence[str]) -> list[str]:
    directories = [place for place in repositories if place.startswith("/")]
    indexes = [place for place in repositories if not place.startswith("/")]
    options = ["--index-url", indexes[0]] if indexes else ["--no-index"] if repositories else []
    for index in indexes[1:]:
        options += ["--extra-index-url", index]
    for directory in directories:
        options += ["--find-links", directory]
    return options


def _pip(python: Path, arguments: Sequence[str], source: str, *, alone: bool = False, temporary: str = "") -> None:
    """`alone`: use only the indexes in the arguments."""
    done = _run_pip(python, ("install", "--quiet", *arguments), alone=alone, temporary=temporary)
    if done.returncode:
        print(done.stderr, file=sys.stderr, flush=True)
        raise failure(done.stderr, source)


def _run_pip(
    python: Path, arguments: Sequence[str], *, alone: bool, temporary: str = ""
) -> subprocess.CompletedProcess[str]:
    environment = os.environ | ({"TMPDIR": temporary} if temporary else {})
    if alone:
        environment = {name: value for name, value in environment.items() if name not in _INDEX_VARIABLES}
        environment["PIP_CONFIG_FILE"] = os.devnull
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    return subprocess.run([*pip, *arguments], capture_output=True, text=True, check=False, env=environment)


def failure(messages: str, source: str) -> UserError:
    """pip's messages as an error of one line; `source` names where pip searched."""
    if _NO_SPACE.search(messages):
        return UserError(
            "pip install failed: no space left", "free space on the volume, or in the directory that TMPDIR names"
        )
    missing = _NOT_FOUND.search(messages)
    if unreached := _NOT_REACHED.search(messages):
        return UserError(
            f"pip install failed: cannot reach {source}: {_line_of(messages, unreached)}",
            f"check the network, a proxy, and {_SETTING}, then resume",
        )
    if missing:
        return UserError(
            f"pip install failed: {missing[1]} is not in {source}",
            f"check {_SETTING}: AWS's Neuron repository, and PyTorch's index of CPU builds for torch",
        )
    message = last_line(messages) or "no error message"
    return UserError(f"pip install failed: {message}", "check the network and the package index, then resume")


def _line_of(messages: str, found: re.Match[str]) -> str:
    begin = messages.rfind("\n", 0, found.start()) + 1
    end = messages.find("\n", found.end())
    return messages[begin : end if end >= 0 else len(messages)].strip()[:300]


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


_HAS_NEURON = {"torch": False, "trl": False, "neuron": True, "torch-neuron": True}  # the environments, by their kind


def build(pins: Path, environment: Path, kind: str = "torch", repositories: tuple[str, ...] = ()) -> None:
    """Create a virtual environment at `environment` with the packages of the requirements file `pins`.

    Raises UserError when there is no suitable interpreter, or pip cannot install the packages.
    """
    with _new_environment(pins, environment) as partial:
        python = partial / "bin" / "python"
        # that of AWS's machine image, on top of which every node must then have it
        image = torch_neuron.of_machine_image() if kind == "torch-neuron" else None
        if image:
            print(f"env: using TorchNeuron of {image}", flush=True)
            interpreters.create_on_top_of(image, partial)
        elif kind == "torch":
            interpreters.create_with(Path(sys.executable), partial)
        else:
            interpreters.create_environment(partial, environment.parent, PYTHON_VERSIONS[kind])
        if image:
            install_others(python, pins)
        elif _HAS_NEURON[kind]:
            install_neuron(python, pins, repositories)
        else:
            install(python, pins)


def build_inside(inside: Sequence[str], pins: Path, environment: Path) -> None:
    """Create one in a container, on top of an interpreter of the image; `inside`: what runs programs there.

    Raises UserError with the last line of what the program there says.
    """
    with _new_environment(pins, environment) as partial, _on_the_volume(partial) as temporary:
        # not for srun, whose plugin unpacks images
        program = ["env", f"TMPDIR={temporary}", "python3", "-m", "hyperpod_ft.environments.image_interpreter"]
        done = subprocess.run(
            [*inside, *program, str(partial / "bin" / "python"), str(pins)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        print(done.stdout, end="", flush=True)
        if done.returncode:
            raise images.failure("cannot add packages to the image's Python", done.stdout)


def build_on_top_of(base: Path, pins: Path, environment: Path) -> None:
    """The same, with the packages of another environment too; `base`: its interpreter."""
    with _new_environment(pins, environment) as partial:
        interpreters.create_on_top_of(base, partial)
        with _on_the_volume(partial) as temporary:
            install(partial / "bin" / "python", pins, temporary)


@contextlib.contextmanager
def _new_environment(pins: Path, environment: Path) -> Iterator[Path]:
    """Yield the directory to create the environment in. It gets its name once the packages are installed."""
    print(f"installing {pins.name} into {environment}; this takes a few minutes", flush=True)
    with publish.new_directory(environment) as partial:
        yield partial
        interpreters.move_scripts(partial, environment)


def _on_the_volume(partial: Path) -> "tempfile.TemporaryDirectory[str]":
    """A directory for what pip downloads: in a container, /tmp is memory."""
    return tempfile.TemporaryDirectory(dir=partial)
