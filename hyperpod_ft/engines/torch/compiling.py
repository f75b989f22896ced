"""torch.compile for each decoder layer: layers of one shape share a graph, so compiling takes as long as for one.

What was compiled is kept on the shared volume, below the root of all runs, for other ranks, restarts and runs.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from hyperpod_ft.config.run_config import Training


def compile_layers(layers: Sequence[nn.Module], training: Training, device: torch.device, root: Path) -> None:
    """Compile the layers' forward and backward passes when they first run, as `training.compile` says.

    `root`: of the runs. Shapes must not change: a new one is compiled again.
    """
    wanted = training.compile
    if not (device.type != "cpu" if wanted is None else wanted):
        return
    cache = cache_directory(root, device)
    # read when something is compiled first
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache / "inductor")
    os.environ["TRITON_CACHE_DIR"] = str(cache / "triton")
    os.environ["TORCH_NEURONX_NEFF_CACHE_DIR"] = str(cache / "neuron")
    backend = "neuron" if device.type == "neuron" else "inductor"
    for layer in layers:
        layer.forward = torch.compile(layer.forward, backend=backend, dynamic=False)  # type: ignore[method-assign]


def cache_directory(root: Path, device: torch.device) -> Path:
    """Where compiled code for this torch and Python is kept; within it, compilers tell devices and graphs apart."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return root / "compile-cache" / f"torch-{torch.__version__}-python-{python}-{device.type}"
