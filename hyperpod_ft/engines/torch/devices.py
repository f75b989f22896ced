"""What differs between kinds of devices, where torch itself does not hide it; and what compiles layers for them.

Layers of one shape share a graph, so compiling takes as long as for one. What was compiled is kept on the
shared volume, below the root of all runs, for other ranks, restarts and runs.
"""

import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from hyperpod_ft.config.sections.training import Training
from hyperpod_ft.processes import usable_cpus

# by their names in a run file
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Of a function, before torch runs what is new of it uncompiled. Layers of one class share a function; torch's own limit
# is 8, fewer than the layers of a model whose layers share no graph.
GRAPHS = 64


def fixed_shapes(device: torch.device) -> bool:
    """Whether the device compiles each operation for given shapes, so that shapes must not change between steps.

    Such a device lacks operations with results whose shape depends on values, and computes int64 with 32 bits. True of
    TorchNeuron (AWS's documentation of Neuron 2.33: "torch.compile on Neuron", "Guidelines for memory management").
    """
    return device.type not in ("cpu", "cuda")


def host_threads(ranks: int) -> int:
    """The share of this process's cores that each of so many ranks on the node has."""
    return max(1, usable_cpus() // ranks)


class HostCopy:
    """A copy of a tensor in host memory, which the device makes while the program continues."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._event = tensor, None
        if pins(tensor.device):
            self._tensor = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
            self._event = torch.Event(tensor.device)
            self._event.record()

    def wait(self) -> torch.Tensor:
        """The copy, once it is complete."""
        if self._event:
            self._event.synchronize()
        return self._tensor.cpu()


def copied_to(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a CPU tensor on `device`, from pinned memory where the program then continues meanwhile."""
    if pins(device) and torch.accelerator.is_available():
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def is_asynchronous(device: torch.device) -> bool:
    """Whether the program continues while the device computes."""
    return device.type != "cpu"


def same_bits(device: torch.device) -> bool:
    """Whether ranks that compute the same get the same bits. On a GPU, each may choose other kernels."""
    return device.type != "cuda"


def pins(device: torch.device) -> bool:
    """Whether the device copies from and to pinned host memory while the program continues."""
    return device.type == "cuda"


def pin(memory: torch.Tensor, device: torch.device) -> None:
    """Make host memory that another library has allocated as good for the device's copies as pinned memory.

    Raises RuntimeError when the device's driver refuses.
    """
    if pins(device):
        status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        if status:
            raise RuntimeError(f"cudaHostRegister of {memory.nbytes} bytes: error {status}")


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
    torch._dynamo.config.recompile_limit = GRAPHS
    backend = "neuron" if device.type == "neuron" else "inductor"
    for layer in layers:
        layer.forward = torch.compile(layer.forward, backend=backend, dynamic=False, fullgraph=fixed_shapes(device))


def compiles_no_more() -> bool:
    """Whether a function has had so many graphs that what is new of it runs uncompiled."""
    return any("recompile limit" in reason for reason in torch._dynamo.utils.counters["unimplemented"])


class LeftToHost:
    """The operations that TorchNeuron leaves to the CPU in this process; it does so silently.

    The list is the one that torch-neuronx's own tests read and clear.
    """

    def __init__(self) -> None:
        self._named = set[str]()

    def new(self) -> str:
        """Those since the last call that no call has named, with how often; empty without any."""
        neuron = sys.modules.get("torch_neuronx")
        left = Counter(getattr(neuron, "get_fallback_ops", list)())
        getattr(neuron, "clear_op_tracking", list)()  # it would grow with each step
        new = [(name, count) for name, count in left.most_common() if name not in self._named]
        self._named.update(left)
        return ", ".join(f"{name} ({count})" for name, count in new)


def let_vary(tensor: torch.Tensor, dimension: int) -> None:
    """Let one compiled graph serve all sizes of this dimension."""
    torch._dynamo.maybe_mark_dynamic(tensor, dimension)


def cache_directory(caches: Path, device: torch.device) -> Path:
    """Where compiled code for this torch and Python is kept; within it, compilers tell devices and graphs apart."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return caches / f"torch-{torch.__version__}-python-{python}-{device.type}"
