"""Build a virtual environment from a file of pins: for the CPU and CUDA, for engine neuron, for TorchNeuron."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from hyperpod_ft import publish
from hyperpod_ft.environments import interpreters
from hyperpod_ft.environments.installation import install, install_neuron, install_others
from hyperpod_ft.planning.pins import PYTHON_VERSIONS


def build(pins: Path, environment: Path, kind: str = "torch", repositories: tuple[str, ...] = ()) -> None:
    """Create a virtual environment at `environment` with the packages of the requirements file `pins`.

    Raises UserError when there is no suitable interpreter, or pip cannot install the packages.
    """
    with _new_environment(pins, environment) as partial:
        _BUILDERS[kind](partial, environment.parent, pins, repositories)


def build_on_top_of(base: Path, pins: Path, environment: Path) -> None:
    """The same, with the packages of another environment too; `base`: its interpreter."""
    with _new_environment(pins, environment) as partial:
        interpreters.create_on_top_of(base, partial)
        install(partial / "bin" / "python", pins)


@contextlib.contextmanager
def _new_environment(pins: Path, environment: Path) -> Iterator[Path]:
    """Yield the directory to create the environment in. It gets its name once the packages are installed."""
    print(f"installing {pins.name} into {environment}; this takes a few minutes", flush=True)
    with publish.new_directory(environment) as partial:
        yield partial
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
