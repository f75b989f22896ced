"""Whether a model fits an endpoint's instance: its weights and KV cache against the accelerators' memory. Pure.

The estimate is vLLM's own budget: of each device it uses the share `MEMORY_SHARE` (--gpu-memory-utilization, which the
requests set) for weights, activations and, with the rest, the KV cache. It refuses to start when the cache does not
hold one request of the longest length. Neuron's server allocates the cache of all requests at once instead.
"""

from dataclasses import dataclass

from hyperpod_ft.config.instances import ENDPOINT_INSTANCES, Instance
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.memory import GIB
from hyperpod_ft.planning.model_shape import ModelShape

MEMORY_SHARE = 0.9
# Activations of a step and captured graphs of one device, GiB. An assumption: vLLM measures it when it starts.
WORK_GIB = 2.0
_CACHE_BYTES = 2  # an element of the KV cache, in bf16
_SUGGESTED = 3  # types in a refusal


@dataclass(frozen=True)
class ServedModel:
    """What is loaded. `weight_bytes`: as served, with adapters; `shape`: None for families that the kit cannot size."""

    weight_bytes: int
    shape: ModelShape | None
    heads: int  # of queries, over which devices may divide it; 1 where the server uses one device
    positions: int | None  # the model's own longest request, in tokens
    model_type: str


@dataclass(frozen=True)
class ServingFit:
    """How a model is divided over an instance's devices, and what of each device it takes. Sizes in GiB."""

    instance: Instance
    tensor_parallel: int
    max_length: int  # of a request, tokens
    weights: float  # on one device
    cache: float | None  # of one request of `max_length`, on one device; None when its size is unknown

    @property
    def free(self) -> float:
        """What a device has left for the KV cache; negative when not even the weights fit."""
        return MEMORY_SHARE * self.instance.rank_gib - WORK_GIB - self.weights

    @property
    def longest_requests(self) -> int | None:
        """How many requests of `max_length` the cache holds at once."""
        return None if self.cache is None else int(max(self.free, 0) / self.cache)

    def arithmetic(self) -> str:
        """For example "14.96 GiB of weights + 2 GiB of activations (assumed) of 19.8 GiB (90 % of 22) on each of 1"."""
        instance = self.instance
        budget = (
            f"{MEMORY_SHARE * instance.rank_gib:.1f} GiB ({MEMORY_SHARE:.0%} of {instance.rank_gib:g}) on each of"
            f" {self.tensor_parallel} {'GPU' if instance.device == 'cuda' else 'NeuronCore'}"
            f"{'s' * (self.tensor_parallel > 1)}"
        )
        taken = f"{self.weights:.2f} GiB of weights + {WORK_GIB:g} GiB of activations (assumed)"
        if self.cache is None:
            return f"{taken} of {budget}; the KV cache of this model type is unknown and not counted"
        return f"{taken} + {self.cache:.2f} GiB of KV cache for a request of {self.max_length:,} tokens, of {budget}"


def fit(served: ServedModel, instance: Instance, max_length: int, concurrency: int) -> ServingFit:
    """The division of a model over all devices of an instance. Raises UserError, with arithmetic, if it does not fit.

    `max_length` is a request's longest length in tokens, `concurrency` how many the server may compute at once.
    """
    if served.positions is not None and max_length > served.positions:
        raise UserError(
            f"deploy.max_length: {max_length:,} tokens, but the model has {served.positions:,} positions",
            f"set it to {served.positions} or less",
        )
    found = _divided(served, instance, max_length)
    if _fits(found, concurrency):
        return found
    others = sorted(ENDPOINT_INSTANCES.values(), key=lambda other: other.device_gib * other.devices)
    suggested = [
        other.name
        for other in others
        if other.device == instance.device and _fits(_divided(served, other, max_length), concurrency)
    ][:_SUGGESTED]
    remedies = [f"choose {' or '.join(suggested)}"] if suggested else []
    if shorter := _longest(found, concurrency):
        remedies.insert(0, f"set deploy.max_length to {shorter} or less")
    many = f" for each of {concurrency} requests" if instance.is_neuron else ""
    raise UserError(
        f"deploy.instance_type: the model does not fit {instance.name}: {found.arithmetic()}{many}",
        "; or ".join(remedies) or "no known instance type fits it",
    )


def _fits(found: ServingFit, concurrency: int) -> bool:
    needed = concurrency if found.instance.is_neuron else 1
    return found.free > 0 and (found.longest_requests is None or found.longest_requests >= needed)


def _longest(found: ServingFit, concurrency: int) -> int:
    """The longest requests that would fit, rounded down to 64 tokens; 0 when the weights alone do not."""
    if found.cache is None or found.free <= 0:
        return 0
    needed = concurrency if found.instance.is_neuron else 1
    return int(found.max_length * found.free / (found.cache * needed)) // 64 * 64


def _divided(served: ServedModel, instance: Instance, max_length: int) -> ServingFit:
    degree = _degree(served, instance.ranks or 1)
    return ServingFit(
        instance, degree, max_length, served.weight_bytes / degree / GIB, _cache(served, degree, max_length)
    )


def _degree(served: ServedModel, devices: int) -> int:
    """The largest power of two of devices over which the heads divide: all memory of the instance is paid for."""
    heads, kv_heads = served.heads, served.shape.kv_heads if served.shape else served.heads
    degree = 1
    while 2 * degree <= devices and heads % (2 * degree) == 0 and _shares(kv_heads, 2 * degree):
        degree *= 2
    return degree


def _shares(kv_heads: int, degree: int) -> bool:
    """Each rank has whole key/value heads, or a copy of one."""
    return kv_heads % degree == 0 or degree % kv_heads == 0


def _cache(served: ServedModel, degree: int, max_length: int) -> float | None:
    """KV cache of one request on one device, GiB: keys and values of each layer, for the rank's heads."""
    shape = served.shape
    if shape is None:
        return None
    heads = max(1, shape.kv_heads // degree)
    return 2 * shape.layers * heads * shape.head_dim * _CACHE_BYTES * max_length / GIB
