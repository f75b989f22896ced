"""A rank's stages of a pipeline: what is left of a Hugging Face model whose other layers are on other ranks.

Parameters keep their names, so that loading, checkpoints and exports see the parts of one model. A stage computes with
transformers' own forward pass of the decoder, around this stage's layers: every stage makes masks and rotary embeddings
from its own copy of the batch, and only hidden states travel.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from hyperpod_ft.engines.torch.mesh import pipeline_ends
from hyperpod_ft.engines.torch.model.language_model import LossForward
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.families import Family, family_of

# What transformers' forward passes drop out before the first layer.
_DROPOUTS = ("drop", "emb_dropout")


@dataclass(frozen=True)
class StageLayers:
    """One of the parts that a batch passes through, one after another."""

    index: int
    count: int  # of all stages
    layers: range

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.count - 1


def keep(model: PreTrainedModel, stages: Sequence[StageLayers], mesh: DeviceMesh) -> dict[str, dist.ProcessGroup]:
    """Drop what other ranks have, and let `forward` compute one of this rank's stages: see `_StageForward`.

    The model returns its loss (`language_model.return_loss`) and is on the meta device. An embedding that is tied to
    the output matrix and trained stays on the last stage too: both are saved under its name. Returns this name with the
    ranks of the pipeline's two ends, if this rank is one of them. Collective over all ranks of the weights' `mesh`.
    """
    whole, family = model.forward, _family(model)
    assert isinstance(whole, LossForward)
    first, last = (any(getattr(stage, end) for stage in stages) for end in ("first", "last"))
    tied = _trains_tied_embedding(model, family)
    ends = pipeline_ends(mesh) if tied else None
    layers = model.get_submodule(family.layers)
    own = {str(number) for stage in stages for number in stage.layers}
    for name in layers._modules.keys() - own:
        del layers._modules[name]
    if not first:
        dropped = [family.positions] if family.positions else []
        if not (last and tied):
            dropped.append(family.embedding)
        _drop(model, dropped)
    if not last:
        _drop(model, [family.last_norm, family.head])
    # transformers' own returns None once the embedding is dropped
    model.get_output_embeddings = lambda: model.get_submodule(family.head)  # type: ignore[method-assign]
    views = [_view(model.base_model, stage, family) for stage in stages]
    model.forward = _StageForward(stages, views, whole)
    return {f"{family.embedding}.weight": ends} if ends else {}


def _trains_tied_embedding(model: PreTrainedModel, family: Family) -> bool:
    """Whether embedding and output matrix are one parameter that is trained."""
    embedding, head = (model.get_parameter(f"{path}.weight") for path in (family.embedding, family.head))
    return head is embedding and head.requires_grad


def _family(model: PreTrainedModel) -> Family:
    family = family_of(model.config.model_type)
    assert family is not None, "only known families have pipelines"
    return family


def _drop(model: nn.Module, paths: Sequence[str]) -> None:
    for path in paths:
        owner, _, name = path.rpartition(".")
        delattr(model.get_submodule(owner), name)


def check_trained(model: PreTrainedModel, stages: Sequence[StageLayers]) -> None:
    """Raise UserError when one of all the stages would train nothing; on every rank, since `model` is whole."""
    layers = list(model.get_submodule(_family(model).layers).children())
    for stage in stages:
        parameters = (parameter for number in stage.layers for parameter in layers[number].parameters())
        if not any(parameter.requires_grad for parameter in parameters):
            raise UserError(
                f"lora.target_modules: matches nothing in layers {stage.layers[0]} to {stage.layers[-1]}, which are one"
                " pipeline stage",
                "name modules of all layers, or set parallelism.pipeline_parallel to 1",
            )


def _view(decoder: Any, stage: StageLayers, family: Family) -> nn.Module:
    """A decoder that computes this stage alone: its layers, which it shares with `decoder`, and what else it has."""
    layers, norm = (path.rpartition(".")[2] for path in (family.layers, family.last_norm))
    view: Any = copy.copy(decoder)
    view._modules = dict(decoder._modules)
    every = getattr(decoder, layers)._modules
    setattr(view, layers, nn.ModuleList(every[str(number)] for number in stage.layers))
    if not stage.last:
        setattr(view, norm, nn.Identity())
    if not stage.first:
        for name in _DROPOUTS:
            if name in view._modules:
                setattr(view, name, nn.Identity())
        if family.positions:
            setattr(view, family.positions.rpartition(".")[2], _NoPositions())
        if hasattr(view, "embedding_multiplier"):
            view.embedding_multiplier = 1.0  # Granite's factor of what its forward pass begins with
    if layer_types := getattr(decoder.config, "layer_types", None):
        # indexed by position in `layers`
        view.config = copy.copy(decoder.config)
        view.config.layer_types = [layer_types[number] for number in stage.layers]
    assert isinstance(view, nn.Module)
    return view


class _NoPositions(nn.Module):
    """Replaces an embedding of positions, which the first stage has added."""

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return torch.zeros((), device=positions.device)


class _StageForward:
    """The forward pass of one of this rank's stages."""

    def __init__(self, stages: Sequence[StageLayers], decoders: Sequence[nn.Module], whole: LossForward) -> None:
        self._stages, self._decoders, self._whole = stages, decoders, whole

    def __call__(
        self,
        stage: int,
        hidden: torch.Tensor | None,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        targets: torch.Tensor,
        predicted_at: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states [rows, length, width], or from the last stage the loss of the batch, fp32 [].

        `stage`: its place among the rank's own; `hidden`: what the stage before returned, None for the first. The
        others are the inputs of the whole model.
        """
        start = {"input_ids": input_ids} if hidden is None else {"inputs_embeds": hidden}
        hidden = self._whole.decode(self._decoders[stage], position_ids, attention_mask, **start)
        return self._whole.loss(hidden, targets, predicted_at) if self._stages[stage].last else hidden
