"""The device of a server: which one an option means, and whether it still computes."""

import torch

from hyperpod_ft.errors import UserError, first_sentence


def device_named(name: str) -> torch.device:
    """`auto` is the GPU if torch finds one. Raises UserError for one that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {name}: {first_sentence(error)}", "use auto, cpu or cuda") from error


def is_usable(device: torch.device) -> bool:
    """Whether the device still computes: after some errors, such as a failed assertion in a kernel, it never does."""
    try:
        torch.ones(1, device=device).add_(1).item()
    except RuntimeError:
        return False
    return True
