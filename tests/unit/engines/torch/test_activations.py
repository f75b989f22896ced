"""Recomputing and moving activations changes what is kept, and no bit of losses and gradients."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig

from hyperpod_ft.config.sections.training import Training
from hyperpod_ft.engines.torch.model import activations

LAYERS, ROWS, LENGTH, WIDTH = 4, 2, 32, 64
CPU = torch.device("cpu")


def llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=WIDTH,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        attention_dropout=0.1,
    )
    return AutoModelForCausalLM.from_config(config).train()


def changed(mode: str = "none", every: int = 1, offload: int | None = None) -> Any:
    """A model whose tensors of `offload` bytes or more move to host memory."""
    model = llama()
    layers = list(model.model.layers)
    activations.checkpoint_layers(layers, Training(activation_checkpointing=mode, activation_checkpointing_every=every))
    if offload is not None:
        activations.offload_layers(layers, CPU, offload)
    return model


def loss_of(model: Any) -> torch.Tensor:
    ids = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH)
    loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


def trained(model: Any) -> dict[str, torch.Tensor]:
    """Losses and gradients of two micro batches, with dropout."""
    torch.manual_seed(1)
    losses = []
    for _ in range(2):
        loss = loss_of(model)
        loss.backward()
        losses.append(loss.detach())
    return {"loss": torch.stack(losses)} | {name: p.grad for name, p in model.named_parameters()}


def kept(model: Any) -> int:
    """Bytes that stay after a forward pass, besides parameters."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = loss_of(model)
    assert loss.requires_grad
    return sum(size for pointer, size in found.items() if pointer not in weights)


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    return trained(llama())


@pytest.mark.parametrize(
    ("mode", "every", "offload"),
    [
        ("selective", 1, None),
        ("full", 1, None),
        ("selective", 2, None),
        ("full", 3, None),
        ("none", 1, 1),
        ("none", 1, 1 << 13),
        ("selective", 1, 1),
        ("full", 1, 1),
        ("full", 2, 1 << 13),
    ],
)
def test_no_bit_changes(expected: dict[str, torch.Tensor], mode: str, every: int, offload: int | None) -> None:
    found = trained(changed(mode, every, offload))
    assert found.keys() == expected.keys(), "parameters keep their names"
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_frozen_inputs(expected: dict[str, torch.Tensor]) -> None:
    """With adapters, the first layer's input needs no gradient."""
    for mode in ("selective", "full"):
        model = changed(mode, offload=1)
        model.model.embed_tokens.requires_grad_(False)
        found = trained(model)
        assert all(torch.equal(found[name], value) for name, value in expected.items() if "embed" not in name)


class Products(TorchDispatchMode):
    """Counts the matrix products that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **kwargs or {})


def test_selective_computes_no_product_again() -> None:
    def products(mode: str) -> int:
        with Products() as counted:
            loss_of(changed(mode)).backward()
        return counted.count

    once = products("none")
    assert products("selective") == once
    assert products("full") == once + 6 * LAYERS, "nothing needs the result of a layer's last one"


def test_a_recomputed_layer_keeps_only_its_input() -> None:
    none, second, full = (kept(changed(*choice)) for choice in (("none",), ("full", 2), ("full",)))
    assert none - second == pytest.approx(second - full, rel=0.01), "half of the layers each"
    assert full < none / 4


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[activations._OffloadedStorage]:
    """What has been moved, in the order of the forward passes."""
    found: list[activations._OffloadedStorage] = []
    original = activations._ActivationStore.take

    def take(self: Any, source: torch.Tensor) -> activations._OffloadedStorage:
        found.append(original(self, source))
        return found[-1]

    monkeypatch.setattr(activations._ActivationStore, "take", take)
    return found


def on_the_device(made: list[activations._OffloadedStorage]) -> list[bool]:
    return [storage.device is not None for storage in made]


def layer_inputs_leave() -> Any:
    return changed("full", offload=ROWS * LENGTH * WIDTH * 4)


def test_offloaded_tensors_leave_the_device(made: list[activations._OffloadedStorage]) -> None:
    """After the forward pass only the last layer's are on the device; each layer's return one layer ahead."""
    model = layer_inputs_leave()
    present: dict[int, list[bool]] = {}
    for index, layer in enumerate(model.model.layers):
        layer.register_full_backward_pre_hook(lambda *_, index=index: present.update({index: on_the_device(made)}))
    loss = loss_of(model)
    assert len(made) == LAYERS, "only the input of each layer"
    assert on_the_device(made) == [False] * (LAYERS - 1) + [True]
    loss.backward()
    # when a layer's turn comes its own input is back, and that of the layer before it is still away
    assert {index: found[: index + 1] for index, found in present.items()} == {
        index: [False] * index + [True] for index in range(LAYERS)
    }


def test_they_return_one_layer_ahead_in_a_pipeline_too(made: list[activations._OffloadedStorage]) -> None:
    """Of each micro batch, though others passed through the layers since; all but its last layer's."""
    model = layer_inputs_leave()
    back: list[tuple[int, int, bool]] = []
    micro_batch = 0
    for index, layer in enumerate(model.model.layers):
        layer.register_full_backward_pre_hook(
            lambda *_, index=index: back.append((micro_batch, index, on_the_device(made)[micro_batch * LAYERS + index]))
        )
    losses = [loss_of(model) for _ in range(3)]
    for micro_batch, loss in enumerate(losses):  # noqa: B007 - read by the hooks
        loss.backward()
    assert back == [(number, index, index < LAYERS - 1 or number == 2) for number in range(3) for index in (3, 2, 1, 0)]


def test_validation_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations._ActivationStore, "take", lambda *_: pytest.fail("moved"))
    with torch.no_grad():
        loss_of(changed("none", offload=1))
