"""Counts the bytes that a rank sends, by kind of collective.

Collectives are counted as ring algorithms send them (Thakur et al., doi 10.1177/1094342005051521, section 4): of n
bytes over p ranks, (p - 1)/p in an all-gather, a reduce-scatter or an all-to-all, and twice that in an all-reduce. What
a library sends may differ; these figures do not depend on it.
"""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# The name in the count, how many times (p - 1)/p of the buffer are sent, and the argument that is the whole buffer.
_COLLECTIVES = {
    "c10d::allreduce_": ("all-reduce", 2, 0),
    "c10d::_allgather_base_": ("all-gather", 1, 0),
    "c10d::_reduce_scatter_base_": ("reduce-scatter", 1, 1),
    "_c10d_functional::all_to_all_single": ("all-to-all", 1, 0),
}
_SEND = "c10d::send"
_NOTHING_SENT = {"c10d::recv_", "_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"}


class SentBytes(TorchDispatchMode):
    """While it is active; `by_kind` in bytes. Raises NotImplementedError for a collective that it does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.by_kind: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name == _SEND:
            self.by_kind["send"] += _nbytes(args[0])
        elif name in _COLLECTIVES:
            kind, times, whole = _COLLECTIVES[name]
            ranks = _group(args).size()
            if ranks > 1:
                self.by_kind[kind] += times * _nbytes(args[whole]) * (ranks - 1) // ranks
        elif name.startswith(("c10d::", "_c10d_functional::")) and name not in _NOTHING_SENT:
            raise ValueError(f"{name}: how many bytes this collective sends is not known")
        return func(*args, **kwargs or {})


def _nbytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tree_leaves(tensors))


def _group(args: Any) -> dist.ProcessGroup:
    """Functional collectives name their group, others have it among their arguments."""
    for argument in args:
        if isinstance(argument, str):
            name: Any = argument  # a type of its own in newer releases
            return _resolve_process_group(name)
        if isinstance(argument, torch.ScriptObject):
            return dist.ProcessGroup.unbox(argument)
    raise ValueError("a collective without a group")
