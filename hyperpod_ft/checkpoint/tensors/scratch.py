"""Reusable buffers of each thread, for computing block by block: allocating each time costs as much as computing."""

import math
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

_local = threading.local()


def scratch(use: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """An uninitialized array for one `use`, valid until this thread's next call for the same use."""
    buffers: dict[str, NDArray[np.uint8]] = _local.__dict__.setdefault("buffers", {})
    size = math.prod(shape) * dtype.itemsize
    if use not in buffers or buffers[use].size < size:
        buffers[use] = np.empty(size, np.uint8)
    return buffers[use][:size].view(dtype).reshape(shape)
