"""A container's interpreter for the stages: the image's own, or a virtual environment on top of it, with the pins.

    python3 -m hyperpod_ft.environments.image_interpreter PYTHON PINS             makes it, with a base of the image
    python3 -m hyperpod_ft.environments.image_interpreter PYTHON PINS --on-this   makes it with this interpreter

The environment holds only what the image lacks or has in another version. An image with the pinned torch keeps its own
build, with its CUDA libraries: nothing large is downloaded. One with TorchNeuron keeps it, and all that belongs to it.

Runs before there is any package: standard library of Python 3.8 only, with `--on-this` of Python 3.10.
"""

from __future__ import annotations

import os
import re
import shutil
import site
import subprocess
import sys
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path

from hyperpod_ft.errors import EXIT_USER_ERROR, UserError, last_line, print_error

# Where AWS's images have Python, besides PATH.
_DIRECTORIES = ("/opt/venv/bin", "/opt/conda/bin", "/usr/local/bin", "/usr/bin")
_NAMES = ("python3", *(f"python3.{minor}" for minor in range(14, 9, -1)))
# Exits with 0 if the kit can run there and packages can be added, with 1 if it lacks the module in its argument.
_SUITABLE = """
import ensurepip, importlib.util, sys
sys.exit(2 if sys.version_info < (3, 10) else importlib.util.find_spec(sys.argv[1]) is None)
"""
_PIN = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?==([^ ;]+).*")  # a name, perhaps with extras, and a version
_OF_TORCH = ("nvidia-", "cuda-", "triton")  # packages that torch brings with it
_AWS = "aws.txt"  # beside the pins of the engines, for the kit's transfers and requests
_MODULE = "hyperpod_ft.environments.image_interpreter"
_TORCH_NEURON = "torch-neuron"  # pins of which an image has its own versions
_ON_THIS = "--on-this"


def prepare(python: Path, pins: str, code: Path) -> None:
    """Make sure that `python` exists; create it with `pins`, a file below `code`. Raises UserError when it cannot."""
    if os.access(python, os.X_OK):
        return
    if not pins:
        raise UserError(f"env.python: no {python} in this image", "leave env.python out, or set sagemaker.image")
    base = _base(code / pins)
    print(f"interpreter: {base} with the packages of {pins}, in {python.parent.parent}", flush=True)
    done = subprocess.run(
        [base, "-m", _MODULE, str(python), str(code / pins), _ON_THIS],
        env={**os.environ, "PYTHONPATH": str(code)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(done.stdout, end="", flush=True)
    if done.returncode:
        last = last_line(done.stdout) or "no error message"
        raise UserError(
            f"interpreter: cannot install the packages of {pins}: {last}",
            "check that the job can reach a package index",
        )


def _base(pins: Path) -> str:
    """An interpreter of the image, if possible one with torch. Raises UserError when none is suitable.

    For Neuron it must have torch-neuronx: pip would look for that on PyPI, where it is not AWS's.
    """
    neuron = bool(re.search("^torch-neuronx", pins.read_text(encoding="utf-8"), re.MULTILINE))
    module = "torch_neuronx" if neuron else "torch"
    found = [sys.executable, *(shutil.which(name) for name in _NAMES)]
    found += [shutil.which(name, path=os.pathsep.join(_DIRECTORIES)) for name in _NAMES]
    second = None
    for candidate in dict.fromkeys(found):
        if candidate is not None:
            command = [candidate, "-c", _SUITABLE, module]
            status = subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode
            if status == 0:
                return candidate
            second = second or (candidate if status == 1 and not neuron else None)
    if second is None:
        needed = "ensurepip and torch-neuronx" if neuron else "ensurepip"
        raise UserError(
            f"no Python 3.10 or newer with {needed} in this image", "set sagemaker.image or env.container to another"
        )
    return second


def to_install(pins: Iterable[str], installed: Callable[[str], str | None]) -> list[str]:
    """The pins that an image lacks. `installed`: the version of a package there, without its local part, or None.

    Raises ValueError for a line that is not a pin.
    """
    lines = [line for line in (line.split("#")[0].strip() for line in pins) if line]
    found = []
    torch_is_there = False
    for line in lines:
        pin = _PIN.fullmatch(line)
        if pin is None:
            raise ValueError(f"{line!r} is not name==version")
        name, version = pin.groups()
        if not _is_pinned(installed(name), version):
            found.append(line)
        elif name == "torch":
            torch_is_there = True
    if torch_is_there:
        found = [line for line in found if not line.startswith(_OF_TORCH)]
    return found


def _is_pinned(installed: str | None, version: str) -> bool:
    """Whether it is that version, or with `.*` at the end one that begins so."""
    if installed is None or not version.endswith(".*"):
        return installed == version
    return f"{installed}.".startswith(version.removesuffix("*"))


def options(pins: Iterable[str]) -> list[str]:
    """pip's for these pins: those of engine torch name every package, those for Neuron leave dependencies to pip."""
    return [] if any(line.startswith("torch-neuronx") for line in pins) else ["--no-deps"]


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name).split("+")[0]
    except metadata.PackageNotFoundError:
        return None


def create(python: Path) -> None:
    """Create a virtual environment on top of the running interpreter's packages. Raises CalledProcessError."""
    environment = python.parent.parent
    # not --system-site-packages: of a virtual environment, these would be those of the interpreter under it
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    for site_packages in environment.glob("lib/python*/site-packages"):
        (site_packages / "image.pth").write_text("\n".join(site.getsitepackages()), encoding="utf-8")


def install(python: Path, pins: Path) -> None:
    """Install what the running interpreter lacks of the pins, and of those for AWS. Raises CalledProcessError."""
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet"]
    for file in (pins, pins.with_name(_AWS)):
        lines = file.read_text(encoding="utf-8").splitlines()
        if file.stem == _TORCH_NEURON and _installed("torch-neuronx"):
            from hyperpod_ft.planning.pins import from_neuron_repositories  # noqa: PLC0415 - needs Python 3.9

            own = from_neuron_repositories(tuple(lines))
            lines = [line for line in lines if line not in own]
        if missing := to_install(lines, _installed):
            print(f"interpreter: installing {len(missing)} packages of {file.name}", flush=True)
            subprocess.run([*pip, *options(lines), *missing], check=True)


def main(python: Path, pins: Path, *options: str) -> int:
    """Run the command line; returns the exit status."""
    if options == (_ON_THIS,):
        create(python)
        install(python, pins)
        return 0
    try:
        prepare(python, str(pins), Path(__file__).resolve().parents[2])
    except UserError as error:
        print_error("env", str(error))
        return EXIT_USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]))
