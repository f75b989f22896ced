"""A Hugging Face causal language model that returns its loss: documents apart, logits in blocks."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hyperpod_ft.data.packing import IGNORED
from hyperpod_ft.engines.batches import Batch
from hyperpod_ft.engines.torch import devices
from hyperpod_ft.engines.torch.model import attention
from hyperpod_ft.engines.torch.model.context_parallel import SequenceChunk
from hyperpod_ft.engines.torch.model.loss import LogitsRule, document_cross_entropies, summed_cross_entropy
from hyperpod_ft.engines.torch.model.router_loss import FixedDecoder, RouterLoss, around, router_loss_of, tokens_of
from hyperpod_ft.errors import UserError

_WHOLE_ROWS = SequenceChunk()


def inputs(
    batch: Batch,
    device: torch.device,
    compiled: bool = False,
    chunk: SequenceChunk = _WHOLE_ROWS,
    *,
    by_document: bool = False,
) -> dict[str, Any]:
    """The arguments of a model's forward pass, on `device`, from a batch on the CPU. `compiled`: its layers are.

    input_ids, position_ids [rows, length of the chunk]; attention_mask as in attention.py, of whole rows; targets int64
    [positions], the tokens to predict; predicted_at int64 [positions], where in the chunks of the batch's rows laid end
    to end, unless it is everywhere; `by_document`: documents, how many of these positions are in each document that
    has some, for whole rows on CPU and CUDA.
    """
    # the token after each, which may be in the next chunk; none follows the last of a row
    following = torch.nn.functional.pad(batch.labels[:, 1:], (0, 1), value=IGNORED)
    targets = chunk.take(following).flatten()
    own = {"input_ids": batch.input_ids, "position_ids": batch.position_ids}
    tensors = {name: chunk.take(tensor) for name, tensor in own.items()} | predicted(targets, device)
    # a graph would break where attention, as on CPUs, is called for each document
    by_bounds = not devices.fixed_shapes(device) and not (compiled and device.type == "cpu")
    documents = attention.document_bounds if by_bounds else attention.document_numbers
    tensors["attention_mask"] = documents(batch.position_ids)
    moved: dict[str, Any] = {name: devices.copied_to(device, tensor) for name, tensor in tensors.items()}
    if by_bounds:
        attention.keep_lengths(moved["attention_mask"], tensors["attention_mask"])
        if compiled:
            devices.let_vary(moved["attention_mask"], dimension=3)
    if by_document:
        numbers = (batch.position_ids == 0).flatten().cumsum(0)[tensors["predicted_at"]]
        moved["documents"] = tuple(torch.unique_consecutive(numbers, return_counts=True)[1].tolist())
    return moved


def predicted(targets: torch.Tensor, device: torch.device) -> dict[str, torch.Tensor]:
    """`targets` and `predicted_at` of `inputs`, from the target of every position, int64 [positions]."""
    if devices.fixed_shapes(device):
        return {"targets": targets}
    at = (targets != IGNORED).nonzero().flatten()
    return {"targets": targets[at], "predicted_at": at}


def return_loss(model: PreTrainedModel, *, fused: bool = False) -> RouterLoss | None:
    """Make the model's forward pass take `inputs` and return the cross entropy summed over its targets, fp32 [].

    With `documents`, it is summed over each document, fp32 [documents]. Returns what measures the load-balancing loss
    of routers in each forward pass of training, if the model's config.json asks for it.

    The loss is part of the forward pass of the model itself, where its head is gathered when parameters are sharded;
    the names of its parameters stay. `fused`: see LogitsRule. Raises UserError for a family whose logits are not those
    of a head, scaled and softly capped, or whose load-balancing loss transformers does not compute.
    """
    router_loss = router_loss_of(model)
    rule = replace(_logits_rule(model.config), fused=fused)
    check_logits(model, rule, stacks=(model.base_model_prefix,))
    model.forward = LossForward(model, rule, router_loss)
    return router_loss


class LossForward:
    """The forward pass of a model that returns its loss, in two halves, so that a pipeline can have them apart."""

    def __init__(self, model: PreTrainedModel, rule: LogitsRule, router_loss: RouterLoss | None = None) -> None:
        self._model, self._rule, self._router_loss = model, rule, router_loss
        self._separates = model.config._attn_implementation == attention.NAME

    def __call__(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        targets: torch.Tensor,
        predicted_at: torch.Tensor | None = None,
        documents: tuple[int, ...] | None = None,
    ) -> torch.Tensor:
        measured = {"output_router_logits": True} if self._router_loss and self._model.training else {}
        decoded = self._decoded(self._model.base_model, position_ids, attention_mask, input_ids=input_ids, **measured)
        if self._router_loss and measured:
            self._router_loss.measure(decoded.router_logits, tokens_of(position_ids, targets, predicted_at))
        return self.loss(decoded[0], targets, predicted_at, documents)

    def decode(
        self, decoder: nn.Module, position_ids: torch.Tensor, attention_mask: torch.Tensor, **start: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states [rows, length, width] from `input_ids` or `inputs_embeds`."""
        hidden: torch.Tensor = self._decoded(decoder, position_ids, attention_mask, **start)[0]
        return hidden

    def _decoded(
        self, decoder: nn.Module, position_ids: torch.Tensor, attention_mask: torch.Tensor, **arguments: Any
    ) -> Any:
        return decoder(
            position_ids=position_ids,
            attention_mask=attention_mask if self._separates else None,
            use_cache=False,
            **arguments,
        )

    def loss(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        predicted_at: torch.Tensor | None = None,
        documents: tuple[int, ...] | None = None,
    ) -> torch.Tensor:
        """The cross entropy summed over the targets, fp32 [], or over those of each document, fp32 [documents]."""
        hidden = hidden.flatten(0, 1)
        if predicted_at is not None:
            hidden = hidden.index_select(0, predicted_at)
        head = _head(self._model)
        if documents is not None:
            return document_cross_entropies(hidden, head, targets, self._rule, documents)
        return summed_cross_entropy(hidden, head, targets, self._rule)


def _head(model: PreTrainedModel) -> nn.Linear:
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear), "check_logits refuses models without one"
    return head


def _logits_rule(config: Any) -> LogitsRule:
    """The rule by the names that transformers' families use: Cohere multiplies, Granite divides, Gemma 2 caps."""
    return LogitsRule(
        scale=(getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0),
        softcap=getattr(config, "final_logit_softcapping", None),
    )


@torch.no_grad()
def check_logits(model: PreTrainedModel, rule: LogitsRule, stacks: Sequence[str]) -> None:
    """Compare the family's own logits for one random hidden state with those by `rule`; no weight is touched.

    `stacks`: the names of the model's parts that are called before its head. Raises UserError when they differ.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or not _follows(model, head, rule, stacks):
        raise UserError(
            f"model.source: engine torch does not know how {type(model).__name__} computes its logits",
            "choose a model of another family",
        )


def _follows(model: PreTrainedModel, head: nn.Linear, rule: LogitsRule, stacks: Sequence[str]) -> bool:
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 1, head.in_features, generator=random)
    try:
        with torch.random.fork_rng(devices=[]):
            narrow = nn.Linear(head.in_features, 3, head.bias is not None, device="cpu", dtype=torch.float32)
        probe = around(model, stacks, FixedDecoder(hidden), narrow)
        ids = torch.zeros(1, 1, dtype=torch.int64)
        of_decoder = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
        found = type(model).forward(probe, input_ids=ids, use_cache=False, **of_decoder).logits
        return torch.allclose(found, rule(narrow(hidden)), rtol=1e-4, atol=1e-5)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return False
