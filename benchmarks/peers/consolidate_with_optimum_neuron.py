"""optimum-neuron's own consolidation: python consolidate_with_optimum_neuron.py CHECKPOINT OUTPUT

Its modules import Neuron packages that exist only for Trainium. Consolidation uses two classes of torch_xla
(`TensorReference`, and the arena that replaces each reference by its tensor) and nothing else of them, so this file
provides stand-ins. All code that reads, joins and writes tensors is upstream's.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import types

_ABSENT = ("libneuronxla", "neuronx_distributed", "neuronxcc", "nki", "torch_neuronx", "torch_xla")


class TensorReference:
    """As torch_xla's: what xser pickles in a tensor's place; `tid` is the tensor's number."""


TensorReference.__module__ = "torch_xla.utils.serialization"


class ToXlaTensorArena:
    """As torch_xla's, for dictionaries: converts the values that `select` picks."""

    def __init__(self, convert, select):
        self._convert, self._select = convert, select

    def transform(self, values):
        chosen = [key for key, value in values.items() if self._select(value)]
        return values | dict(zip(chosen, self._convert([values[key] for key in chosen]), strict=True))


_USED = {
    ("torch_xla.utils.serialization", "TensorReference"): TensorReference,
    ("torch_xla.core.xla_model", "ToXlaTensorArena"): ToXlaTensorArena,
}


class _Module(types.ModuleType):
    """Any name imported from it is an empty class, except the classes that are used."""

    __path__ = ()
    __version__ = "0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _USED.get((self.__name__, name)) or type(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        absent = name.split(".")[0] in _ABSENT
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if absent else None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


if __name__ == "__main__":
    os.environ["DISABLE_TRANSFORMERS_PATCHING"] = "1"
    sys.meta_path.insert(0, _Finder())
    from optimum.neuron.models.training.checkpointing import (
        consolidate_model_parallel_checkpoints_to_unified_checkpoint as consolidate,
    )

    consolidate(sys.argv[1], sys.argv[2])
