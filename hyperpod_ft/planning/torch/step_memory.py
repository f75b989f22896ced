"""What counts the memory of a training step, by the kind of the model's shape."""

from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.planning.layout import Degrees, Sharding
from hyperpod_ft.planning.model_shape import ModelShape
from hyperpod_ft.planning.t5_shape import T5Shape
from hyperpod_ft.planning.torch.memory import T5Memory, TorchMemory
from hyperpod_ft.planning.torch.sharded_state import ShardedState
from hyperpod_ft.planning.torch.undivided_memory import UndividedMemory
from hyperpod_ft.planning.undivided.shape import UndividedShape


def memory_of(config: RunConfig, degrees: Degrees, shape: ModelShape) -> TorchMemory:
    """What counts the memory of training a model of this shape."""
    if isinstance(shape, T5Shape):
        return T5Memory(config, degrees, shape)
    if isinstance(shape, UndividedShape):
        return UndividedMemory(config, degrees, shape)
    return TorchMemory(config, degrees, shape)


def checkpoint_memory(config: RunConfig, degrees: Degrees, shape: ModelShape, sharding: Sharding) -> float:
    """Bytes of a node's own memory for memory checkpoints, 0 without them: two states of each rank, own and received.

    As if every rank had as much as the fullest.
    """
    if not config.training.memory_checkpoint_every_steps:
        return 0.0
    stages = memory_of(config, degrees, shape).stages
    state = max(ShardedState(config, degrees, shape, stage, sharding).saved for stage in stages)
    return 2 * state * degrees.ranks_per_node * min(degrees.nodes, 2)
