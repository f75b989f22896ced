"""What differs between kinds of devices, where torch itself does not hide it."""

import torch

# by their names in a run file
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def fixed_shapes(device: torch.device) -> bool:
    """Whether the device compiles each operation for given shapes, so that shapes must not change between steps.

    Such a device lacks operations with results whose shape depends on values, and computes int64 with 32 bits. True of
    TorchNeuron (AWS's documentation of Neuron 2.33: "torch.compile on Neuron", "Guidelines for memory management").
    """
    return device.type not in ("cpu", "cuda")


def pins(device: torch.device) -> bool:
    """Whether the device copies from and to pinned host memory while the program continues."""
    return device.type == "cuda"
