"""XLA's device as plain CPU tensors: nothing is lazy, so that a step is over when it has been given."""

import inspect
import os
import textwrap
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_env_vars as xla_env
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer

CPU = torch.device("cpu")

_closures: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []


def _environment(name: str, default: int) -> Callable[[], int]:
    """The variable, whenever it is asked: a rank may be a fork of a process that has installed all this."""
    return lambda: int(os.environ.get(name, default))


def _cpu(*_: object, **__: object) -> torch.device:
    return CPU


def _nothing(*_: object, **__: object) -> None:
    return None


def _sync(*_: object, **__: object) -> None:
    """Run what waits for the end of the step."""
    while _closures:
        closure, arguments = _closures.pop(0)
        closure(*arguments)


def _add_step_closure(closure: Callable[..., Any], args: tuple[Any, ...] = (), run_async: bool = False) -> None:
    _closures.append((closure, args))


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The factory, for which device "xla" is the CPU."""

    @wraps(factory)
    def make(*arguments: Any, **options: Any) -> torch.Tensor:
        if str(options.get("device")).startswith("xla"):
            options["device"] = CPU
        return factory(*arguments, **options)

    return make


def _without_assertions(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, compiled as `python -O` does. (ZeRO-1 asserts that parameters are on an XLA device.)"""
    source = textwrap.dedent(inspect.getsource(method))
    namespace: dict[str, Any] = {}
    exec(compile(source, inspect.getfile(method), "exec", optimize=1), method.__globals__, namespace)
    compiled: Callable[..., Any] = namespace[method.__name__]
    return compiled


_strided_view = torch.Tensor.view


def _view(tensor: torch.Tensor, *shape: Any, **options: Any) -> torch.Tensor:
    """`view` of a tensor that is not contiguous: XLA's tensors have no strides, so that it always succeeds there."""
    try:
        return _strided_view(tensor, *shape, **options)
    except RuntimeError as error:
        if "view size is not compatible" not in str(error):
            raise
        return tensor.reshape(*shape)


def install() -> None:
    torch_xla.device = xm.xla_device = _cpu
    torch_xla.sync = xm.mark_step = xm._run_step_closures = _sync
    xm.add_step_closure = _add_step_closure
    xm.unlazy = xm.wait_device_ops = xm.set_rng_state = xm.optimization_barrier_ = _nothing

    xr.device_type = lambda: "CPU"
    xr.addressable_device_count = lambda: 1
    rank, local_rank = _environment("RANK", 0), _environment("LOCAL_RANK", 0)
    xr.world_size = xr.global_device_count = xr.process_count = _environment("WORLD_SIZE", 1)
    xr.global_ordinal = xr.process_index = rank
    xr.local_ordinal = xm.get_local_ordinal = local_rank
    xr.local_device_count = xr.local_process_count = _environment("LOCAL_WORLD_SIZE", 1)
    xm.is_master_ordinal = lambda local=True: (local_rank if local else rank)() == 0
    # AWS's build of torch_xla has it, the public one has not; this is torchrun's variable for the number of nodes
    xla_env.HOST_WORLD_SIZE = "GROUP_WORLD_SIZE"

    # optimum-neuron's eager attention makes its causal mask on device "xla"
    torch.ones = _on_cpu(torch.ones)
    torch.Tensor.view = _view
    ZeroRedundancyOptimizer._shard_parameters = _without_assertions(ZeroRedundancyOptimizer._shard_parameters)
