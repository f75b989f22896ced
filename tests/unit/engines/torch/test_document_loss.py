"""The loss of each document against that of whole logits, and DPO's formula."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hyperpod_ft.config.sections.training import Dpo, Lora
from hyperpod_ft.engines.torch.lora import adapters
from hyperpod_ft.engines.torch.model import loss
from hyperpod_ft.engines.torch.model.loss import LogitsRule, document_cross_entropies
from hyperpod_ft.engines.torch.objectives.objective import DirectPreference
from tests.unit.engines.torch.test_attention import Largest

WIDTH, VOCABULARY = 16, 50
COUNTS = (5, 1, 23, 10)  # blocks are of 10
WEIGHTS = torch.tensor([0.3, -2.0, 1.5, 0.25])


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "loss_block", lambda *, fused: 10)
    monkeypatch.setattr(loss, "_compiled", lambda: loss.softmax_less_one_hot_at_once)


def example(dtype: torch.dtype = torch.float32, bias: bool = False) -> tuple[torch.Tensor, nn.Linear, torch.Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(sum(COUNTS), WIDTH, dtype=dtype, requires_grad=True)
    return hidden, nn.Linear(WIDTH, VOCABULARY, bias=bias, dtype=dtype), torch.randint(0, VOCABULARY, (sum(COUNTS),))


@pytest.mark.parametrize("head_is", ["frozen", "trained", "with bias", "adapted"])
@pytest.mark.parametrize(
    "rule",
    [LogitsRule(), LogitsRule(scale=3.0, softcap=1.5), LogitsRule(scale=3.0, softcap=1.5, fused=True)],
    ids=str,
)
def test_losses_and_weighted_gradients_are_those_of_whole_logits(rule: LogitsRule, head_is: str) -> None:
    hidden, plain, targets = example(bias=head_is == "with bias")
    head: nn.Module = plain
    if head_is == "frozen":
        plain.requires_grad_(False)
    elif head_is == "adapted":
        model = nn.ModuleDict({"lm_head": plain})
        model.config = SimpleNamespace(model_type="llama")
        adapters.adapt(model, Lora(r=2, target_modules=("lm_head",)), seed=0)
        head = model["lm_head"]
        assert isinstance(head, adapters.LoraLinear)
        nn.init.normal_(head.lora_B.weight, std=0.02)
    wanted = [hidden, *(parameter for parameter in head.parameters() if parameter.requires_grad)]
    found = document_cross_entropies(hidden, head, targets, rule, COUNTS)
    each = cross_entropy(rule(head(hidden)), targets, reduction="none")
    expected = torch.stack([part.sum() for part in each.split(COUNTS)])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-5)
    gradients: Any = (torch.autograd.grad((losses * WEIGHTS).sum(), wanted) for losses in (found, expected))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(document_cross_entropies(hidden, head, targets, rule, COUNTS), found)


def test_a_trained_head_keeps_no_gradient_for_the_backward_pass() -> None:
    hidden, _, targets = example()
    head = nn.Linear(WIDTH, 5000, bias=False)
    with Largest() as whole:
        document_cross_entropies(hidden, head, targets, LogitsRule(), COUNTS).sum().backward()
    assert whole.elements == head.weight.numel()
    kept = torch.autograd.graph.saved_tensors_hooks(lambda tensor: sizes.append(tensor.numel()), lambda _: None)
    sizes: list[int] = []
    with kept:
        document_cross_entropies(hidden, head, targets, LogitsRule(), COUNTS)
    assert sorted(sizes) == sorted(tensor.numel() for tensor in (hidden, head.weight, targets))


def test_bf16_sums_over_documents_in_32_bits() -> None:
    hidden, head, targets = example(torch.bfloat16)
    losses = document_cross_entropies(hidden, head, targets, LogitsRule(), COUNTS)
    found = torch.autograd.grad((losses * WEIGHTS).sum(), head.weight)[0]
    exact = head.weight.double().detach().requires_grad_()
    each = cross_entropy(hidden.detach().double() @ exact.t(), targets, reduction="none")
    weights = WEIGHTS.double().repeat_interleave(torch.tensor(COUNTS))
    expected = torch.autograd.grad((each * weights).sum(), exact)[0]
    assert found.dtype == torch.bfloat16
    assert (found - expected).norm() / expected.norm() < 6e-3


def test_a_batch_without_documents() -> None:
    hidden, head, targets = example()
    nothing = document_cross_entropies(hidden[:0], head, targets[:0], LogitsRule(), ())
    assert nothing.shape == (0,)
    assert DirectPreference(Dpo()).of_log_probabilities(nothing, nothing).tolist() == [0.0] * 5


def test_dpo_of_two_pairs() -> None:
    model, reference = torch.tensor([-1.0, -3.0, -1.5, -2.5]), torch.tensor([-2.0, -2.0, -1.0, -4.0])
    # chosen and rejected rewards with beta 0.5: 0.5 and -0.5, -0.25 and 0.75
    found = DirectPreference(Dpo(beta=0.5)).of_log_probabilities(model, reference)
    margins = torch.tensor([1.0, -1.0], dtype=torch.float64)
    losses = torch.log1p(torch.exp(-margins))
    assert found.tolist() == pytest.approx([losses.sum().item(), 0.25, 0.25, 0.0, 1.0])
    smoothed = DirectPreference(Dpo(beta=0.5, label_smoothing=0.1)).of_log_probabilities(model, reference)
    flipped = torch.log1p(torch.exp(margins))
    assert smoothed[0].item() == pytest.approx((0.9 * losses + 0.1 * flipped).sum().item())
