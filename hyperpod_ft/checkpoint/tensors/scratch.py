"""Each thread's own memory for what is computed block by block: allocating it anew costs as much as computing."""

import math
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

_local = threading.local()


def scratch(use: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """An array for one `use`; what it holds is anything. Valid until the thread's next call for the same use."""
    buffers: dict[str, NDArray[np.uint8]] = _local.__dict__.setdefault("buffers", {})
    size = math.prod(shape) * dtype.itemsize
    if use not in buffers or buffers[use].size < size:
        buffers[use] = np.empty(size, np.uint8)
    return buffers[use][:size].view(dtype).reshape(shape)
