"""The loss in blocks against the loss of whole logits."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

from hyperpod_ft.config.sections.training import Lora
from hyperpod_ft.data.packing import IGNORED
from hyperpod_ft.engines.torch.lora import adapters
from hyperpod_ft.engines.torch.model import language_model, loss
from hyperpod_ft.engines.torch.model.loss import LogitsRule, summed_cross_entropy
from hyperpod_ft.errors import UserError
from tests.unit.engines.torch.test_attention import Largest
from tests.unit.tiny_families import SIZES

WIDTH, VOCABULARY, POSITIONS = 16, 50, 23
SETTINGS = [{}, {"scale": 0.25}, {"softcap": 2.0}, {"scale": 3.0, "softcap": 1.5}]
RULES = [LogitsRule(**settings, fused=fused) for fused in (False, True) for settings in SETTINGS]


class Adapted(nn.Linear):
    """A head that is more than its weight, as one with an adapter."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) * 1.5


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "loss_block", lambda *, fused: 10)
    # a GPU's compiler fuses it; what it computes is the same
    monkeypatch.setattr(loss, "_compiled", lambda: loss.softmax_less_one_hot_at_once)


def example(kind: type[nn.Linear], bias: bool, dtype: torch.dtype) -> tuple[torch.Tensor, nn.Linear, torch.Tensor]:
    torch.manual_seed(0)
    head = kind(WIDTH, VOCABULARY, bias=bias, dtype=dtype)
    hidden = torch.randn(POSITIONS, WIDTH, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, VOCABULARY, (POSITIONS,))
    targets[::4] = IGNORED
    return hidden, head, targets


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("kind", [nn.Linear, Adapted])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_loss_and_gradients_are_those_of_whole_logits(
    rule: LogitsRule, bias: bool, kind: type[nn.Linear], trained: bool
) -> None:
    hidden, head, targets = example(kind, bias, torch.float32)
    head.requires_grad_(trained)
    wanted = [hidden, *(head.parameters() if trained else [])]
    found = summed_cross_entropy(hidden, head, targets, rule)
    expected = cross_entropy(rule(head(hidden)), targets, ignore_index=IGNORED, reduction="sum")
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-5)
    # divided afterwards, as by the tokens of a step
    gradients = zip(torch.autograd.grad(found / 7, wanted), torch.autograd.grad(expected / 7, wanted), strict=True)
    for one, other in gradients:
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    chosen = targets != IGNORED
    torch.testing.assert_close(summed_cross_entropy(hidden[chosen], head, targets[chosen], rule), found)


@pytest.mark.parametrize("fused", [False, True])
def test_bf16_sums_over_blocks_in_32_bits(fused: bool) -> None:
    hidden, head, targets = example(nn.Linear, False, torch.bfloat16)
    found = torch.autograd.grad(summed_cross_entropy(hidden, head, targets, LogitsRule(fused=fused)), head.weight)[0]
    exact = head.weight.double().detach().requires_grad_()
    logits = hidden.detach().double() @ exact.t()
    expected = torch.autograd.grad(cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum"), exact)[0]
    assert found.dtype == torch.bfloat16
    assert (found - expected).norm() / expected.norm() < 6e-3


def test_a_batch_without_targets_has_zero_gradients() -> None:
    hidden, head, _ = example(nn.Linear, True, torch.float32)
    nothing = summed_cross_entropy(hidden[:0], head, torch.empty(0, dtype=torch.int64), LogitsRule())
    nothing.backward()
    assert nothing == 0 and hidden.grad is not None and not hidden.grad.any()


def test_no_tensor_is_as_large_as_the_logits() -> None:
    hidden, head, targets = example(nn.Linear, False, torch.float32)
    with Largest() as largest:
        summed_cross_entropy(hidden, head, targets, LogitsRule()).backward()
    assert largest.elements == max(10 * VOCABULARY, WIDTH * VOCABULARY) < POSITIONS * VOCABULARY


def test_the_same_bits_each_time() -> None:
    hidden, head, targets = example(nn.Linear, True, torch.float32)
    wanted = [hidden, *head.parameters()]
    runs = [torch.autograd.grad(summed_cross_entropy(hidden, head, targets, RULES[3]), wanted) for _ in range(2)]
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


def test_compiles_without_a_break() -> None:
    hidden, head, targets = example(nn.Linear, False, torch.float32)
    compiled = torch.compile(summed_cross_entropy, fullgraph=True, backend="aot_eager", dynamic=False)
    found = compiled(hidden, head, targets, LogitsRule())
    torch.testing.assert_close(found, summed_cross_entropy(hidden, head, targets, LogitsRule()))
    found.backward()


@pytest.mark.parametrize("bias", [True, False])
def test_validation_computes_no_gradients(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, head, targets = example(nn.Linear, bias, torch.float32)
    trained = summed_cross_entropy(hidden, head, targets, LogitsRule())
    wanted: list[tuple[bool, ...]] = []
    forward = loss._LossPerPosition.forward

    def spy(ctx: Any, *arguments: Any) -> torch.Tensor:
        wanted.append(ctx.needs_input_grad)
        return forward(ctx, *arguments)

    monkeypatch.setattr(loss._LossPerPosition, "forward", staticmethod(spy))
    with torch.no_grad():
        assert torch.equal(summed_cross_entropy(hidden, head, targets, LogitsRule()), trained)
    assert [any(each) for each in wanted] == [False]


def test_blocks_share_doras_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of the whole matrix, which takes longer to read than a block's product."""
    hidden, base, targets = example(nn.Linear, False, torch.float32)
    head = adapters.LoraLinear(base.requires_grad_(False), Lora(r=2, dora=True))
    with torch.no_grad():
        for parameter in (head.lora_A.weight, head.lora_B.weight, head.lora_magnitude_vector):
            parameter.normal_()
    wanted = [hidden, *(parameter for parameter in head.parameters() if parameter.requires_grad)]
    expected = cross_entropy(head(hidden), targets, ignore_index=IGNORED, reduction="sum")
    expected_gradients = torch.autograd.grad(expected, wanted)
    norms, calls = adapters.squared_row_norms, []
    monkeypatch.setattr(adapters, "squared_row_norms", lambda *args: calls.append(args) or norms(*args))
    found = summed_cross_entropy(hidden, head, targets, LogitsRule())
    gradients = torch.autograd.grad(found, wanted)
    assert len(calls) == 1 and len(wanted) == 4
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-5)
    for one, other in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_model_without_a_linear_head_is_refused() -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))  # type: ignore[no-untyped-call]
    model.get_output_embeddings = lambda: None
    with pytest.raises(UserError, match="does not know how LlamaForCausalLM computes its logits"):
        language_model.return_loss(model)
