"""What differs between kinds of devices, where torch itself does not hide it."""

import os

import torch

# by their names in a run file
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def fixed_shapes(device: torch.device) -> bool:
    """Whether the device compiles each operation for given shapes, so that shapes must not change between steps.

    Such a device lacks operations with results whose shape depends on values, and computes int64 with 32 bits. True of
    TorchNeuron (AWS's documentation of Neuron 2.33: "torch.compile on Neuron", "Guidelines for memory management").
    """
    return device.type not in ("cpu", "cuda")


def host_threads(ranks: int) -> int:
    """The share of this process's cores that each of so many ranks on the node has."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // ranks)


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


def pins(device: torch.device) -> bool:
    """Whether the device copies from and to pinned host memory while the program continues."""
    return device.type == "cuda"
