"""What every rank of test_fixed_shapes.py runs: the training of several runs, one after another.

    python -m forking_torchrun ... -m fixed_shapes_worker RUN_DIR...

The device is the CPU. The engine treats it as one that compiles each shape, as TorchNeuron does, except for a run whose
name ends in `usual`. Each operation is examined (`Examiner`), or, of a run with `compile`, each graph
(`GraphExaminer`). Results are those of torch's own kernels.
"""

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from hyperpod_ft.engines.batches import PackedSplit
from hyperpod_ft.engines.ranks import Ranks, join_ranks
from hyperpod_ft.engines.torch import devices, loop
from hyperpod_ft.engines.torch.objectives.validation import Validation
from hyperpod_ft.runs.run import Run
from tests.tasks import task_of

# The shape of their result depends on values, or a value decides what the program does next.
VALUE_DEPENDENT = {
    *("nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount", "histc"),
    *("_local_scalar_dense", "equal", "is_nonzero", "argwhere", "repeat_interleave"),
}
# Those of the device's process group, as its source has them; others are sends to single ranks, lists of tensors, or
# barriers, which it has for all ranks only.
COLLECTIVES = {
    *("allreduce_", "allgather_", "_allgather_base_", "allgather_into_tensor_coalesced_"),
    *("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"),
    *("broadcast_", "alltoall_", "alltoall_base_"),
}
# The last two move bytes between ranks, and record times.
NAMESPACES = {"aten", "prims", "_c10d_functional", "fsdp", "profiler"}
# What the host computes before the device is asked.
ON_HOST = (
    (loop.TrainingLoop, "_micro_batch"),
    (loop.TrainingLoop, "inputs"),
    (PackedSplit, "batch"),
    (DeviceMesh, "__getitem__"),
)
INT32 = torch.iinfo(torch.int32)


class UnsupportedError(RuntimeError):
    """The device could not do this."""


class Examiner(TorchDispatchMode):
    """Refuses what the device cannot do, and after `seal` what it would have to compile again."""

    def __init__(self) -> None:
        super().__init__()
        self.sealed = False
        self.seen: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        namespace, _, name = func._schema.name.partition("::")
        check_operation(namespace, name, func)
        if name in ("index", "index_put_", "index_put", "_index_put_impl_"):
            check_indices(name, args[1])
        if name == "_fused_adamw_" and kwargs.get("grad_scale") is not None:
            raise UnsupportedError(f"{func}: the device's does not scale gradients")
        signature = func, signature_of(func, args, kwargs)
        if self.sealed and signature not in self.seen:
            raise UnsupportedError(f"{func} is compiled again: {signature[1]}")
        self.seen.add(signature)
        result = func(*args, **kwargs)
        for tensor in tree_leaves((args, kwargs, result)):
            if isinstance(tensor, torch.Tensor):
                check_tensor(func, tensor)
        return result


def check_operation(namespace: str, name: str, func: Any) -> None:
    if namespace == "c10d" and name not in COLLECTIVES:
        raise UnsupportedError(f"{func}: the device's process group has none")
    if namespace not in NAMESPACES | {"c10d"}:
        raise UnsupportedError(f"{func}: the device knows none")
    if name in VALUE_DEPENDENT:
        raise UnsupportedError(f"{func} depends on values")


def check_indices(name: str, indices: Any) -> None:
    if any(isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in indices):
        raise UnsupportedError(f"{name} by a bool tensor depends on values")


def check_tensor(func: Any, tensor: torch.Tensor) -> None:
    if tensor.dtype in (torch.float64, torch.complex128):
        raise UnsupportedError(f"{func} has a tensor of {tensor.dtype}")
    if tensor.dtype == torch.int64 and tensor.numel() and not tensor.is_meta:
        low, high = torch.aminmax(tensor)
        if int(low) < INT32.min or int(high) > INT32.max:
            raise UnsupportedError(f"{func} has a value beyond 32 bits")


def signature_of(func: Any, args: Any, kwargs: Any) -> Any:
    """What a compiler knows of the arguments: shapes, and the numbers that choose a shape, a dimension or a variant.

    It takes a number that is computed with as a tensor without dimensions.
    """
    taken = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    numbers = ("Tensor", "number", "float")
    computed = {argument.name for argument in func._schema.arguments if str(argument.type) in numbers}
    return tuple(
        (name, tuple(described(leaf, name in computed) for leaf in tree_leaves(value))) for name, value in taken.items()
    )


def described(value: Any, computed: bool) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, tuple(value.stride())
    return type(value) if computed else str(value)


class GraphExaminer:
    """A backend of torch.compile that refuses what the device's cannot compile; it runs graphs as they are."""

    def __init__(self) -> None:
        self.sealed = False
        self.seen = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        return aot_autograd(fw_compiler=self._compile)(graph, inputs)

    def _compile(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        if self.sealed:
            raise UnsupportedError("a graph is compiled again")
        self.seen += 1
        for node in graph.graph.nodes:
            value = node.meta.get("val")
            for tensor in tree_leaves(value):
                if isinstance(tensor, torch.SymInt) or (
                    isinstance(tensor, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in tensor.shape)
                ):
                    raise UnsupportedError(f"{node.name} has a shape that varies: {tensor}")
                if isinstance(tensor, torch.Tensor) and tensor.dtype in (torch.float64, torch.complex128):
                    raise UnsupportedError(f"{node.name} is a tensor of {tensor.dtype}")
            if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
                namespace, _, name = node.target._schema.name.partition("::")
                if namespace not in {"aten", "prims", "_c10d_functional"}:
                    raise UnsupportedError(f"{node.target}: the device's compiler does not know it")
                check_operation(namespace, name, node.target)
        return make_boxed_func(graph.forward)


def on_host(function: Callable[..., Any]) -> Any:
    """Its operations are not the device's."""

    def call(*args: Any) -> Any:
        with _disable_current_modes():
            return function(*args)

    return call


def train(run: Run, ranks: Ranks, examiner: Examiner | GraphExaminer) -> None:
    """Train as on the device: under the examiner, of which the first step is the last that may show something new."""
    launch, validation_loss, compile_with = loop.TrainingLoop.launch, Validation.means, torch.compile

    def compile_examined(function: Any, **options: Any) -> Any:
        assert options == {"backend": "inductor", "dynamic": False, "fullgraph": True}
        return compile_with(function, **options | {"backend": examiner})

    def examined(function: Callable[..., Any], seals: bool) -> Any:
        def call(*args: Any) -> Any:
            with examiner if isinstance(examiner, Examiner) else contextlib.nullcontext():
                result = function(*args)
            examiner.sealed |= seals
            return result

        return call

    with contextlib.ExitStack() as patches:
        for owner, name, value in (
            (devices, "fixed_shapes", lambda device: True),
            (torch, "compile", compile_examined),
            (loop.TrainingLoop, "launch", examined(launch, seals=True)),
            # it is measured before the first step too
            (Validation, "means", examined(validation_loss, seals=False)),
            *((owner, name, on_host(getattr(owner, name))) for owner, name in ON_HOST),
        ):
            patches.enter_context(mock.patch.object(owner, name, value))
        loop.train(task_of(run), ranks)
    assert examiner.sealed and examiner.seen, "nothing was examined"


def main() -> None:
    for index, directory in enumerate(map(Path, sys.argv[1:])):
        torch._dynamo.reset()
        run = Run.open(directory)
        joined = join_ranks(run.plan.degrees.world_size)
        store = dist.PrefixStore(str(index), joined.store)
        ranks = Ranks(joined.rank, joined.world_size, joined.local_rank, store)
        if run.config.name.endswith("usual"):
            loop.train(task_of(run), ranks)
        else:
            train(run, ranks, GraphExaminer() if run.config.training.compile else Examiner())


if __name__ == "__main__":
    main()
