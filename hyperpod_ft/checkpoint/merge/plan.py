"""Plans a merge: the source of every tensor of the result, and the updates added to it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from hyperpod_ft.checkpoint.adapters.live_names import with_live_names
from hyperpod_ft.checkpoint.adapters.lora import AdapterEffect
from hyperpod_ft.checkpoint.formats import model_directory
from hyperpod_ft.checkpoint.formats.safetensors_file import read_model
from hyperpod_ft.checkpoint.merge.merged_tensor import MergedTensor, SharedFactors
from hyperpod_ft.checkpoint.tensors.logical_tensor import LogicalTensor
from hyperpod_ft.checkpoint.tensors.reading import same_values
from hyperpod_ft.errors import UserError

_WITH_PEFT = "merge it with PEFT"


@dataclass(frozen=True)
class Base:
    """The base model. `stored`: its tensors by the live model's names; their own are those that a merge writes."""

    directory: Path
    config: Mapping[str, Any]
    stored: Mapping[str, LogicalTensor]

    def written_as(self, name: str) -> str:
        """The name in files of a live model's tensor."""
        return self.stored[name].name if name in self.stored else name

    @property
    def is_conv1d(self) -> bool:
        return model_directory.of_language_model(self.config).get("model_type") in model_directory.CONV1D

    @property
    def is_tied(self) -> bool:
        return model_directory.is_tied(self.config, self.stored)

    @property
    def tensors(self) -> dict[str, LogicalTensor]:
        """All tensors, including the output layer even if only the embedding is stored."""
        return model_directory.with_tied_output(self.stored) if self.is_tied else dict(self.stored)


@dataclass(frozen=True)
class MergePlan:
    """`tensors`: by name, in the base's order. `config`: values that replace those of the base's config.json."""

    tensors: Mapping[str, MergedTensor]
    config: Mapping[str, Any]
    touched: tuple[str, ...]  # tensors that an adapter changes


def read_base(directory: Path, modules: Iterable[str]) -> Base:
    """`modules`: names of some modules of the live model.

    Raises UserError when the model cannot be read, or is quantized.
    """
    config = model_directory.read_config(directory)
    if method := model_directory.quantization(config):
        raise UserError(f"{directory}: the base model is quantized ({method})", "merge into the original weights")
    stored = {tensor.name: tensor for tensor in read_model(directory)}
    return Base(directory, config, with_live_names(modules, stored))


def without_unchanged(adapter: AdapterEffect, base: Base) -> AdapterEffect:
    """The adapter without whole tensors that equal the base's: PEFT saves some untrained ones."""
    tensors = base.tensors
    replaced = {name: tensor for name, tensor in adapter.replaced.items() if not same_values(tensor, tensors[name])}
    return replace(adapter, replaced=replaced)


def make_plan(base: Base, adapters: Sequence[tuple[AdapterEffect, float]]) -> MergePlan:
    """Plan the merge of `adapters`, each with the factor of its updates.

    Raises UserError when adapters conflict, or the result would not be a valid model.
    """
    _refuse_conflicts(adapters)
    touched: dict[str, MergedTensor] = {}
    shared = SharedFactors()
    for adapter, weight in adapters:
        for name, tensor in adapter.replaced.items():
            touched[name] = MergedTensor(tensor)
        for name, update in adapter.updates.items():
            before = touched.get(name, MergedTensor(base.tensors[name]))
            weighted = replace(update, scale=update.scale * weight)
            touched[name] = MergedTensor(before.source, (*before.updates, weighted), shared)
    _check_shapes(base, touched)
    touched, config = _settle_outer_layers(base, touched)
    untouched = {name: MergedTensor(tensor) for name, tensor in base.stored.items()}
    return MergePlan({**untouched, **touched}, config, tuple(touched))


def _check_shapes(base: Base, touched: Mapping[str, MergedTensor]) -> None:
    """Raises UserError for a tensor whose shape is not the base's, and for a tied embedding of unknown name.

    Embedding and output layer may have other shapes: an adapter may resize the vocabulary.
    """
    tensors, embedding = base.tensors, model_directory.embedding(base.stored)
    for name, merged in touched.items():
        if base.is_tied and embedding is None and merged.source.shape[:1] == (base.config.get("vocab_size"),):
            raise UserError(f"{base.directory}: {name} may also be its output layer", _WITH_PEFT)
        if merged.source.shape != tensors[name].shape and name not in (embedding, model_directory.OUTPUT):
            raise UserError(
                f"{merged.source.pieces[0].file}: {name} has shape {list(merged.source.shape)}, the base model's is"
                f" {list(tensors[name].shape)}",
                "use the base that the adapter was trained on",
            )


def _settle_outer_layers(
    base: Base, touched: Mapping[str, MergedTensor]
) -> tuple[dict[str, MergedTensor], dict[str, Any]]:
    """The touched tensors, and the values to change in config.json.

    Embedding and output layer are untied if an adapter changes only one of them, as in the live model.
    """
    tensors, embedding = base.tensors, model_directory.embedding(base.stored)
    settled = dict(touched)
    config: dict[str, Any] = {}
    outer = {
        name: touched.get(name, MergedTensor(tensors[name]))
        for name in (embedding, model_directory.OUTPUT)
        if name in tensors
    }
    if embedding is None or not touched.keys() & outer.keys():
        return settled, config
    if base.is_tied:
        first, second = outer[embedding], outer[model_directory.OUTPUT]
        settled |= outer
        if not first.updates and not second.updates and same_values(first.source, second.source):
            if model_directory.OUTPUT not in base.stored:
                del settled[model_directory.OUTPUT]
        else:
            config["tie_word_embeddings"] = False
    rows = {merged.source.shape[0] for merged in outer.values()}
    if len(rows) > 1:
        raise UserError(
            f"{base.directory}: the vocabulary would have {' and '.join(map(str, sorted(rows)))} tokens: the adapter"
            f" resizes only one of {embedding} and {model_directory.OUTPUT}",
            "save both with the adapter (modules_to_save)",
        )
    if rows != {tensors[embedding].shape[0]}:
        config["vocab_size"] = rows.pop()
    return settled, config


def _refuse_conflicts(adapters: Sequence[tuple[AdapterEffect, float]]) -> None:
    for adapter, weight in adapters:
        if not math.isfinite(weight) or weight == 0:
            raise UserError(
                f"{adapter.where}: weight {weight}: must be a finite number other than 0",
                "correct the weight, or leave the adapter out",
            )
        whole = [*adapter.replaced, *(name for name, update in adapter.updates.items() if update.magnitude)]
        if whole and weight != 1:
            raise UserError(
                f"{adapter.where}: weight {weight}: {whole[0]} is replaced as a whole and cannot be weighted"
                " (modules_to_save, bias or DoRA)",
                "give it weight 1",
            )
    for (one, _), (other, _) in combinations(adapters, 2):
        rescaled = {name for it in (one, other) for name, update in it.updates.items() if update.magnitude}
        replaced = one.replaced.keys() | other.replaced.keys()
        both = (one.updates.keys() | one.replaced.keys()) & (other.updates.keys() | other.replaced.keys())
        if conflict := sorted(both & (rescaled | replaced)):
            raise UserError(
                f"{one.where} and {other.where} both change {conflict[0]}, one of them as a whole"
                " (modules_to_save, bias or DoRA)",
                "merge one of them",
            )
