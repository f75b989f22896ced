"""Degrees of parallelism and the ranks they need; a combination that cannot divide is refused with its arithmetic."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperpod_ft.config import RunConfig
from hyperpod_ft.errors import UserError
from hyperpod_ft.instances import CATALOGUE


@dataclass(frozen=True)
class Degrees:
    """How `nodes * ranks_per_node` processes divide into data, tensor and pipeline parallel groups."""

    nodes: int
    ranks_per_node: int
    tensor_parallel: int
    pipeline_parallel: int

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def data_parallel(self) -> int:
        return self.world_size // (self.tensor_parallel * self.pipeline_parallel)


def degrees(config: RunConfig) -> Degrees:
    """The degrees of a run. Raises UserError when they do not divide the ranks of the nodes."""
    instance = CATALOGUE[config.cluster.instance_type]
    wanted = config.parallelism
    ranks = wanted.ranks_per_node or instance.ranks
    if ranks is None:
        raise UserError(
            f"parallelism.ranks_per_node: instance type {instance.name} does not say how many processes to run",
            "set it, for example to 2",
        )
    if instance.ranks is not None and ranks > instance.ranks:
        raise UserError(
            f"parallelism.ranks_per_node: {ranks} ranks on {instance.name}, which has {instance.ranks}",
            f"set it to {instance.ranks} or leave it out",
        )
    result = Degrees(config.cluster.nodes, ranks, wanted.tensor_parallel, wanted.pipeline_parallel)
    model_ranks = result.tensor_parallel * result.pipeline_parallel
    if result.world_size % model_ranks:
        raise UserError(
            f"parallelism: tensor_parallel {result.tensor_parallel} x pipeline_parallel {result.pipeline_parallel}"
            f" = {model_ranks} does not divide {result.nodes} nodes x {ranks} ranks = {result.world_size}",
            "change one of them",
        )
    if ranks % result.tensor_parallel:
        raise UserError(
            f"parallelism.tensor_parallel: {result.tensor_parallel} does not divide the {ranks} ranks of a node,"
            " so a tensor-parallel group would span nodes",
            "choose a divisor",
        )
    return result


def check_model_directory(wanted: Degrees, directory: Path, engine: str) -> None:
    """`check_model` for a model on disk, so that a job on a CPU finds out, or nobody has to be asked.

    Families that spell these keys in their own way are left to the engine, which knows their attributes.
    """
    try:
        model_config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(
            f"model.source: {directory / 'config.json'}: {reason}", "it has to be a Hugging Face model's directory"
        ) from error
    if isinstance(model_config, dict) and {"num_attention_heads", "num_hidden_layers"} <= model_config.keys():
        check_model(wanted, model_config, engine)


def check_model(wanted: Degrees, model_config: Mapping[str, Any], engine: str) -> None:
    """Refuse degrees that the model's heads or layers cannot be divided by.

    `model_config` is the parsed `config.json` of a Hugging Face model. Engine `torch` does not replicate
    key/value heads, so they must be divisible; engine `neuron` replicates them.
    """
    tensor_parallel = wanted.tensor_parallel
    heads = int(model_config["num_attention_heads"])
    kv_heads = int(model_config.get("num_key_value_heads") or heads)
    layers = int(model_config["num_hidden_layers"])
    if heads % tensor_parallel:
        raise UserError(
            f"parallelism.tensor_parallel: {tensor_parallel} does not divide the model's {heads} attention heads",
            "choose a divisor",
        )
    if engine == "torch" and kv_heads % tensor_parallel:
        raise UserError(
            f"parallelism.tensor_parallel: {tensor_parallel} does not divide the model's {kv_heads} key/value heads,"
            " and engine torch does not replicate them",
            f"choose a divisor of {kv_heads}",
        )
    if engine == "neuron" and kv_heads % tensor_parallel and tensor_parallel % kv_heads:
        raise UserError(
            f"parallelism.tensor_parallel: {tensor_parallel} and the model's {kv_heads} key/value heads do not"
            " divide one another",
            "choose a divisor or a multiple",
        )
    if layers < wanted.pipeline_parallel:
        raise UserError(
            f"parallelism.pipeline_parallel: {wanted.pipeline_parallel} stages for {layers} layers",
            f"choose at most {layers}",
        )
