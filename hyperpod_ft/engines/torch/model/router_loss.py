"""The load-balancing loss of a mixture's routers, where the model's config.json asks for it (`output_router_logits`).

Shares of tokens that experts get, times the probabilities that routers give them (Fedus et al., arXiv:2101.03961,
section 2.2). Both are means over the tokens of one forward pass, so their product is not a sum over tokens: a step has
the mean of its forward passes, the micro batches of all data-parallel ranks.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from hyperpod_ft.data.packing import IGNORED
from hyperpod_ft.errors import UserError

NAME = "aux_loss"
"""In metrics.jsonl: transformers' name, and TRL's. Without the coefficient."""

# transformers' names; the second is JetMoE's
_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")


class RouterLoss:
    """The loss of a model's forward passes, computed by the model's own class: formula and sizes are transformers'.

    `coefficient`: what it is multiplied by before it is added to the loss of the language model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises UserError when transformers computes no such loss for the model."""
        self._newest: torch.Tensor | None = None
        with torch.random.fork_rng(devices=[]):
            head = nn.Linear(1, 1, device="cpu")
        self._decoder = FixedDecoder(torch.zeros(1, 1, 1))
        self._model = around(model, (model.base_model_prefix,), self._decoder, head)
        found = (getattr(model.config, name, None) for name in _COEFFICIENTS)
        coefficient = next((value for value in found if value is not None), None)
        if coefficient is None or self._of(None, None) is None:
            raise UserError(
                "model.source: its config.json asks for the router's load-balancing loss (output_router_logits), which"
                f" transformers does not compute for {type(model).__name__}",
                "set output_router_logits to false there",
            )
        self.coefficient = float(coefficient)

    def measure(self, router_logits: tuple[torch.Tensor, ...], tokens: torch.Tensor) -> None:
        """Keep the loss of a forward pass, fp32 [], for `take`.

        `router_logits`: of each layer, [rows * length, experts]; `tokens`: bool [rows, length], false in padding.
        """
        self._newest = self._of(router_logits, tokens)

    def take(self) -> torch.Tensor:
        """The loss of the newest forward pass, fp32 [], which can be differentiated."""
        newest, self._newest = self._newest, None
        assert newest is not None, "not in training mode"
        return newest

    def _of(self, router_logits: tuple[torch.Tensor, ...] | None, tokens: torch.Tensor | None) -> torch.Tensor | None:
        self._decoder.router_logits = router_logits
        ids = torch.zeros(1, 1, dtype=torch.int64)
        output: Any = type(self._model).forward(
            self._model, input_ids=ids, attention_mask=tokens, use_cache=False, output_router_logits=True
        )
        self._decoder.router_logits = None
        loss: torch.Tensor | None = getattr(output, NAME, None)
        return loss


class FixedDecoder(nn.Module):
    """A decoder that answers what it was given."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden
        self.router_logits: tuple[torch.Tensor, ...] | None = None

    def forward(self, *_: Any, **__: Any) -> MoeModelOutputWithPast:
        values: dict[str, Any] = {"last_hidden_state": self.hidden, "router_logits": self.router_logits}
        return _Decoded(**values)


class _Decoded(MoeModelOutputWithPast):
    """A decoder's output with every field that a family may pass on."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


def around(model: PreTrainedModel, stacks: Sequence[str], decoder: FixedDecoder, head: nn.Linear) -> PreTrainedModel:
    """The model's own class and settings, around a decoder in place of its `stacks`, and another head."""
    probe = copy.copy(model)
    probe._modules = dict(model._modules)
    for stack in stacks:
        setattr(probe, stack, decoder)
    probe.set_output_embeddings(head)
    return probe


def router_loss_of(model: PreTrainedModel) -> RouterLoss | None:
    """The loss that the config.json asks for; None without. Raises UserError as RouterLoss does.

    From then on the model computes it only when asked: its own forward pass would take a mask of documents for one of
    padding.
    """
    if not getattr(model.config, "output_router_logits", False):
        return None
    model.config.output_router_logits = False
    return RouterLoss(model)


def tokens_of(
    position_ids: torch.Tensor, targets: torch.Tensor, predicted_at: torch.Tensor | None = None
) -> torch.Tensor:
    """Where the rows have tokens, not padding: bool [rows, length]; the arguments are `language_model.inputs`.

    Padding is the last document of a row if that predicts nothing, and is not the only one.
    """
    at = (targets != IGNORED).nonzero().flatten() if predicted_at is None else predicted_at
    predicts = torch.zeros_like(position_ids, dtype=torch.bool).flatten().index_fill(0, at, True).view_as(position_ids)
    columns = torch.arange(position_ids.shape[1], device=position_ids.device)
    last = torch.where(position_ids == 0, columns, 0).amax(1, keepdim=True)
    in_last = columns >= last
    padded = ~(predicts & in_last).any(1, keepdim=True) & (last > 0)
    return ~(in_last & padded)
