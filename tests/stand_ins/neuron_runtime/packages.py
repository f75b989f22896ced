"""The packages that only a Neuron node has: they can be imported, and nothing in them does anything."""

import importlib.metadata
import os
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

# The distribution of each package, as AWS Neuron SDK 2.26.1 has them.
DISTRIBUTIONS = {
    "libneuronxla": "2.2.12677.0",
    "neuronx-cc": "2.21.33363.0",
    "neuronx-distributed": "0.15.22404",
    "torch-neuronx": "2.8.0.2.10.16998",
}
PACKAGES = ("libneuronxla", "neuronxcc", "nki", "nkilib", "torch_neuronx")


class Placeholder:
    """Any function, class, decorator, or constant of theirs."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        # what a decorator is applied to stays as it is
        if len(arguments) == 1 and callable(arguments[0]) and not options:
            return arguments[0]
        return self

    def __getattr__(self, name: str) -> "Placeholder":
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder(f"{self.__name__}.{name}")

    def __getitem__(self, key: object) -> "Placeholder":
        return self

    def __or__(self, other: object) -> "Placeholder":
        return self

    __ror__ = __or__

    def __mro_entries__(self, bases: tuple[object, ...]) -> tuple[type, ...]:
        return ()


class PlaceholderModule(ModuleType):
    """A package whose every attribute and submodule exists."""

    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Placeholder:
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder(f"{self.__name__}.{name}")


class _Distribution(importlib.metadata.Distribution):
    def __init__(self, name: str) -> None:
        self._metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {DISTRIBUTIONS[name]}\n"

    def read_text(self, filename: str) -> str | None:
        return self._metadata if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(path)


class _Finder(importlib.metadata.DistributionFinder, Loader):
    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in PACKAGES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return PlaceholderModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context
    ) -> Iterable[importlib.metadata.Distribution]:
        wanted = context.name and context.name.replace("_", "-").lower()
        return [_Distribution(name) for name in DISTRIBUTIONS if wanted in (None, name)]


def platform_target(*_: object) -> str:
    """The chip, by AWS's name: trn1, or what the environment names."""
    return os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE", "trn1")


def install() -> None:
    # after all others: a package that is really there is used
    sys.meta_path.append(_Finder())
    utils = importlib.import_module("torch_neuronx.utils")
    utils.get_platform_target = platform_target  # type: ignore[attr-defined]
    # named in annotations
    torch.classes.neuron = Placeholder("torch.classes.neuron")
    torch.ops.neuron = Placeholder("torch.ops.neuron")
