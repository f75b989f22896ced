"""The load of a mixture's experts: how many tokens routers send to each, counted in the forward passes of training."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hyperpod_ft.engines.torch import devices
from hyperpod_ft.engines.torch.lora.adapters import joined_parameters
from hyperpod_ft.engines.torch.model.router_loss import tokens_of
from hyperpod_ft.runs.results.expert_load import Loads, layer_load


class ExpertCounts:
    """Counts the tokens of each expert on the device, before anything is done with what routers chose.

    Only while the model's own forward pass runs: what a backward pass computes again is not counted again.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device, *, whole_rows: bool) -> None:
        """`model`: undivided; nothing is counted in one without experts that `joined_parameters` finds.

        `whole_rows`: each rank has whole rows. In parts of rows padding cannot be recognized, so it is counted too.
        """
        holders = {name.rpartition(".")[0]: len(model.get_parameter(name)) for name in joined_parameters(model)}
        if devices.fixed_shapes(device):  # not verified there
            holders = {}
        self._layers, self._sizes = [name.removesuffix(".experts") for name in holders], [*holders.values()]
        self._counts = torch.zeros(sum(self._sizes), device=device)
        self._whole_rows = whole_rows
        self._tokens: torch.Tensor | None = None  # bool [rows * length, 1], false in padding
        if holders:
            model.register_forward_pre_hook(self._begin, with_kwargs=True)
            model.register_forward_hook(self._end)
        for name, counts in zip(holders, self._counts.split(self._sizes), strict=True):
            experts: Any = model.get_submodule(name)
            experts.counts = counts  # its own, so that layers of one shape share a compiled graph
            experts.register_forward_pre_hook(self._count, prepend=True)

    def take(self) -> torch.Tensor:
        """This rank's counts since the last call, fp32 [experts of all layers]."""
        taken = self._counts.clone()
        self._counts.zero_()
        return taken

    def loads(self, counts: torch.Tensor) -> Loads:
        """What the counts of a step, fp32 [experts of all layers], say of each layer; on the CPU."""
        by_layer = (of_layer.tolist() for of_layer in counts.split(self._sizes))
        return dict(zip(self._layers, map(layer_load, by_layer), strict=True))

    def _begin(self, model: nn.Module, _: Any, inputs: dict[str, Any]) -> None:
        """`inputs`: as `language_model.inputs` makes them."""
        if not model.training:
            return
        positions = inputs["position_ids"]
        if self._whole_rows:
            tokens = tokens_of(positions, inputs["targets"], inputs.get("predicted_at"))
        else:
            tokens = torch.ones_like(positions, dtype=torch.bool)
        self._tokens = tokens.view(-1, 1)

    def _end(self, *_: Any) -> None:
        self._tokens = None

    def _count(self, experts: Any, arguments: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        """`arguments`: hidden states; the experts chosen and their weights, both [rows * length, k]."""
        if self._tokens is None:
            return
        _, chosen, weights = arguments
        # a router may let a token skip its experts: weight 0
        counted = torch.where(self._tokens & (weights != 0), chosen, -1)
        size = len(experts.counts)
        # unlike bincount, it does not wait for the device
        experts.counts.add_(torch.histc(counted.float(), size, -0.5, size - 0.5))
