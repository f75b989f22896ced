"""What counts the memory of a training step, by the kind of the model's shape."""

from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.planning.layout import Degrees
from hyperpod_ft.planning.model_shape import ModelShape
from hyperpod_ft.planning.t5_shape import T5Shape
from hyperpod_ft.planning.torch.memory import T5Memory, TorchMemory
from hyperpod_ft.planning.torch.undivided_memory import UndividedMemory
from hyperpod_ft.planning.undivided.shape import UndividedShape


def memory_of(config: RunConfig, degrees: Degrees, shape: ModelShape) -> TorchMemory:
    """What counts the memory of training a model of this shape."""
    if isinstance(shape, T5Shape):
        return T5Memory(config, degrees, shape)
    if isinstance(shape, UndividedShape):
        return UndividedMemory(config, degrees, shape)
    return TorchMemory(config, degrees, shape)
