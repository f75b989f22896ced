"""The device `neuron` and its process group, registered with torch as torch-neuronx does, without anything behind them.

In a process of its own: torch's name for the device cannot be taken back.
"""

import subprocess
import sys

PROGRAM = '''
import sys
import types
import warnings

import torch
import torch.distributed as dist
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

started = []


class Module(_DummyBackendModule):
    """torch.neuron."""

    def get_rng_state(self):
        return torch.arange(16, dtype=torch.uint8)

    def set_rng_state(self, state):
        started.append(("random", state.tolist() == list(range(16))))


class Group(dist.ProcessGroup):
    """It refuses a runtime that has started, as torch-neuronx's does, and torch drops gloo in its favour."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        assert started == [], "the runtime must start with the process group"
        started.append("group")

    def _get_backend(self, device):
        return self

    def _set_group_name(self, name):
        self.name = name

    @property
    def group_name(self):
        return self.name

    @property
    def _device_types(self):
        return [torch.device("neuron")]


_setup_privateuseone_for_python_backend("neuron", Module())
dist.Backend.register_backend("neuron", lambda *given: Group(*given), devices=["neuron"])
torch.accelerator.set_device_index = lambda index: started.append(("device", index))
warnings.filterwarnings("ignore", "Set timeout")

from hyperpod_ft.engines.ranks import Ranks, device_of
from hyperpod_ft.engines.torch import devices, mesh, training_state
from hyperpod_ft.planning.layout import Degrees

device = device_of("trn2.48xlarge", 3)
assert (device.type, device.index) == ("neuron", 3) and started == []
assert devices.fixed_shapes(device) and not devices.pins(device)
assert mesh.backend(device) == "cpu:gloo,neuron:neuron"
with mesh.device_meshes(device, Ranks(0, 1, 0, dist.HashStore()), Degrees(1, 1, 1, 1)) as meshes:
    assert started == ["group", ("device", 3)]
    assert meshes.weights.device_type == "neuron" and isinstance(dist.group.WORLD, Group)
    ones = torch.ones(2)
    dist.all_reduce(ones, group=dist.new_group(backend="gloo"))
    state = training_state.random_state(0, device)
    training_state.restore_random_state(state, 0, device)
    assert started[-1] == ("random", True)
left, listed = devices.LeftToHost(), ["aten::mm", "aten::sort", "aten::sort"]
assert left.new() == ""
sys.modules["torch_neuronx"] = types.SimpleNamespace(get_fallback_ops=listed.copy, clear_op_tracking=listed.clear)
assert left.new() == "aten::sort (2), aten::mm (1)" and not listed
assert left.new() == ""
listed += ["aten::mm", "aten::topk"]
assert left.new() == "aten::topk (1)", "of a validation or checkpoint"
print("passed")
'''


def test_the_process_group_comes_before_the_device() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout.endswith("passed\n"), done.stdout + done.stderr
