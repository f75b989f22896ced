"""The drivers of this machine's accelerators, and whether they are new enough. A container has its host's drivers."""

import ctypes
import importlib.util
import re
from pathlib import Path

_NEURON = Path("/sys/module/neuron/version")  # of the module that is loaded; modinfo shows the one that is installed


def neuron() -> str:
    """The version of the Neuron driver; empty where none is loaded."""
    return _NEURON.read_text(encoding="utf-8").strip() if _NEURON.is_file() else ""


def is_older(version: str, wanted: str) -> bool:
    return _numbers(version) < _numbers(wanted)


def neuron_doubt(wanted: str) -> str | None:
    """What to say of a loaded Neuron driver older than `wanted`, the one of the SDK. AWS names no oldest version."""
    version = neuron()
    if not version or not is_older(version, wanted):
        return None
    return (
        f"Neuron driver {version} is older than {wanted}, which AWS released with this SDK: its runtime may refuse to"
        " start; then choose an older env.sdk, or have the driver updated"
    )


def cuda_fault() -> str | None:
    """Why the running interpreter's torch cannot use this machine's NVIDIA driver. Imports no torch."""
    needed, offered = cuda_of_torch(), cuda_of_driver()
    # a driver runs what was built for its own major version, in every minor version (CUDA Compatibility)
    if not needed or not offered or int(needed.split(".")[0]) <= offered[0]:
        return None
    return (
        f"torch is built for CUDA {needed}, and the NVIDIA driver supports CUDA {offered[0]}.{offered[1]}; have the"
        " driver updated, or choose a torch (env.python) or an image (sagemaker.image) for that version"
    )


def cuda_of_torch() -> str:
    """The CUDA version of this interpreter's torch, such as `13.0`; empty without torch, or one for CPUs."""
    found = importlib.util.find_spec("torch")
    file = Path(found.origin).with_name("version.py") if found and found.origin else None
    text = file.read_text(encoding="utf-8") if file and file.is_file() else ""
    version = re.search(r"^cuda\b.*= '(\d+[.\d]*)'", text, re.MULTILINE)
    return version[1] if version else ""


def cuda_of_driver() -> tuple[int, int] | None:
    """The newest CUDA version that the NVIDIA driver supports; None without a driver. Needs no GPU.

    With libraries for forward compatibility in LD_LIBRARY_PATH, as in some images, it is theirs.
    """
    number = ctypes.c_int(0)
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except OSError:
        return None
    return (number.value // 1000, number.value % 1000 // 10) if status == 0 and number.value else None


def _numbers(version: str) -> list[int]:
    return [int(number) for number in version.split(".") if number.isdecimal()]
