"""torch.compile for each decoder layer: layers of one shape share a graph, so compiling takes as long as for one.

What was compiled is kept on the shared volume, below the root of all runs, for other ranks, restarts and runs.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from hyperpod_ft.config.sections.training import Training
from hyperpod_ft.engines.torch import devices


def compiles(training: Training, device: torch.device) -> bool:
    """Whether layers are compiled on this device."""
    return training.compiles(on_accelerator=device.type != "cpu")


def compile_layers(layers: Sequence[nn.Module], training: Training, device: torch.device, caches: Path) -> None:
    """Compile the layers' forward and backward passes when they first run, as `training.compile` says.

    `caches`: where `cache_directory` is. A shape that changes is compiled again. Where shapes are fixed, each layer
    must be one graph: between graphs the device would run one operation at a time.
    """
    if not compiles(training, device):
        return
    cache = cache_directory(caches, device)
    # read when something is compiled first
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache / "inductor")
    os.environ["TRITON_CACHE_DIR"] = str(cache / "triton")
    backend = "neuron" if device.type == "neuron" else "inductor"
    for layer in layers:
        layer.forward = torch.compile(
            layer.forward, backend=backend, dynamic=False, fullgraph=devices.fixed_shapes(device)
        )


def let_vary(tensor: torch.Tensor, dimension: int) -> None:
    """Let one compiled graph serve all sizes of this dimension."""
    torch._dynamo.maybe_mark_dynamic(tensor, dimension)


def cache_directory(caches: Path, device: torch.device) -> Path:
    """Where compiled code for this torch and Python is kept; within it, compilers tell devices and graphs apart."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return caches / f"torch-{torch.__version__}-python-{python}-{device.type}"
