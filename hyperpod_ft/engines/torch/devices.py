"""What differs between kinds of devices, where torch itself does not hide it."""

import torch

# by their names in a run file
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def fixed_shapes(device: torch.device) -> bool:
    """Whether it compiles each operation for the shapes that it is given, so that they must not change between steps.

    It has then no operation whose result's shape depends on values, and it computes with 32 bits, also in int64. True
    of TorchNeuron (AWS's documentation of Neuron 2.33: "torch.compile on Neuron", "Guidelines for memory management").
    """
    return device.type not in ("cpu", "cuda")


def pins(device: torch.device) -> bool:
    """Whether it copies from and to pinned host memory while the program continues."""
    return device.type == "cuda"
