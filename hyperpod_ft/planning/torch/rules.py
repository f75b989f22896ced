"""Engine torch's rules: its part of planning (planning/engine_rules.py says what each name is for)."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hyperpod_ft.config.instances import Instance
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.degrees import Degrees, listed_divisors
from hyperpod_ft.planning.encoder_decoder.rules import FAMILIES
from hyperpod_ft.planning.families import Family, divisible_types, family_of
from hyperpod_ft.planning.memory import Memory
from hyperpod_ft.planning.model_shape import ModelShape, attention_heads
from hyperpod_ft.planning.neuron import environment as neuron_environment
from hyperpod_ft.planning.torch import pipeline_cut, pipeline_schedule, sharding_choice
from hyperpod_ft.planning.torch.memory import memory_of
from hyperpod_ft.planning.torch.packing_rules import SEPARATING_FAMILIES, check_packing
from hyperpod_ft.planning.torch.sequence_parallel import check_sequence_parallel

TRIAL_LAUNCHER: tuple[str, ...] = ()
MEMORY_SETTINGS: tuple[tuple[str, Any], ...] = (
    ("parallelism.sharding", "auto"),
    ("training.optimizer_state", "bf16"),
    ("parallelism.offload", "optimizer"),
    ("parallelism.offload", "parameters"),
)
# values of model_type that transformers' class for causal models takes, but whose attention also sees what follows,
# unless config.json says otherwise: a model trained like that sees its targets
_NOT_CAUSAL = frozenset(
    {
        "bert",
        "bert-generation",
        "big_bird",
        "camembert",
        "data2vec-text",
        "electra",
        "ernie",
        "megatron-bert",
        "rembert",
        "roberta",
        "roberta-prelayernorm",
        "roc_bert",
        "roformer",
        "xlm",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xlnet",
        "xmod",
    }
)


def precompiles(config: RunConfig) -> bool:
    """Trainium takes minutes for a graph, and compiles every operation outside of one too."""
    return config.instance.is_neuron


def generates_on_accelerators(config: RunConfig) -> bool:
    """Each answer grows by a token at a time, and Trainium would compile each length."""
    return not config.instance.is_neuron


def imports(config: RunConfig) -> tuple[str, ...]:
    return ("torch", "torch_neuronx") if config.instance.is_neuron else ("torch",)


def variables(config: RunConfig, cache: Path) -> dict[str, str]:
    return neuron_environment.torch_variables(config, cache)


def graph_settings(config: RunConfig) -> dict[str, str]:
    given = config.parallelism.model_dump(include={"sharding", "shard_ranks", "sequence_parallel"})
    validates = {"validates": str(config.dataset.validation_share > 0)}
    variables = neuron_environment.torch_graph_settings(config)
    return variables | {key: str(value) for key, value in given.items()} | validates


def environment_name(config: RunConfig) -> str:
    return "torch-neuron" if config.instance.is_neuron else "torch"


def packages_remedy(config: RunConfig) -> str:
    if config.instance.is_neuron:
        return "set env.python to an interpreter that has TorchNeuron and the `torch` extra (docs/trainium.md)"
    return "install the `torch` extra there (pip install 'hyperpod-ft[torch]'), or remove env.python"


def program_directories(config: RunConfig, python: Path) -> tuple[Path, ...]:
    """TorchNeuron starts the compiler by name."""
    return (python.parent, neuron_environment.NEURON_TOOLS) if config.instance.is_neuron else ()


def training_settings(config: RunConfig) -> dict[str, Any]:
    return {}


def default_tensor_parallel(instance: Instance, ranks: int) -> int:
    """On Trainium the cores of a chip, as AWS advises ("Best practices for training on AWS Neuron")."""
    return math.gcd(instance.tensor_parallel, ranks) if instance.is_neuron else 1


def check_degrees(config: RunConfig, degrees: Degrees) -> None:
    """All that divide the ranks can be trained, on rows that they divide; on Trainium those without a pipeline."""
    if degrees.pipeline_parallel > 1 and config.instance.is_neuron:
        raise UserError(
            "parallelism.pipeline_parallel: engine torch does not support pipelines on trn2 (not verified with"
            " TorchNeuron)",
            "set it to 1",
        )
    length, ranks = config.dataset.max_length, degrees.context_parallel
    if length % ranks:
        raise UserError(
            f"parallelism.context_parallel: {ranks} does not divide dataset.max_length {length}",
            f"set max_length to {-(-length // ranks) * ranks}, or context_parallel to a divisor of {length}",
        )
    check_sequence_parallel(config, degrees)
    pipeline_schedule.check_micro_batches(config, degrees)


def check_family(config: RunConfig, family: str, degrees: Degrees) -> None:
    """Any family of transformers' causal models trains; dividing one, and packing for it, needs to know it."""
    if family in _NOT_CAUSAL:
        raise UserError(
            f"model.source: models of type {family} are not causal language models",
            "choose a causal language model, or a T5",
        )
    pipeline_cut.check_family(degrees, family)
    if family in FAMILIES and config.instance.is_neuron:
        raise UserError(
            f"model.source: engine torch does not train {family} models on trn2 (not verified with TorchNeuron)",
            "choose a causal language model, or an instance type with GPUs",
        )
    if family in FAMILIES:  # the engine computes all their attention; setting_combinations has the rest
        return
    check_packing(config, family)
    if degrees.context_parallel > 1 and family not in SEPARATING_FAMILIES:
        raise UserError(
            f"parallelism.context_parallel: engine torch does not compute the attention of models of type"
            f" {family or '(none)'} itself, so that their rows cannot be divided",
            "set it to 1",
        )
    if degrees.tensor_parallel > 1:
        divisible_family(family)


def divisible_family(family: str) -> Family:
    """How the models of a config.json's model_type are built. Raises UserError when that is not known."""
    found = family_of(family)
    if found is None:
        raise UserError(
            f"parallelism.tensor_parallel: engine torch cannot divide models of type {family or '(none)'} over"
            " tensor-parallel ranks",
            f"set it to 1, so that data-parallel ranks share the model; it divides {divisible_types()}",
        )
    return found


def check_model_config(model_config: Mapping[str, Any], degrees: Degrees) -> None:
    """transformers 5 reads every spelling of config.json; divided rows need positions that count alike everywhere."""
    if degrees.context_parallel == 1:
        return
    if found := _rope_types(model_config) & {"dynamic", "longrope"}:
        raise UserError(
            f"parallelism.context_parallel: the model's rope_type {found.pop()} depends on the longest document of a"
            " batch, which a rank with only part of each row does not see",
            "set it to 1",
        )
    heads = attention_heads(model_config)
    if heads is not None:
        _check_heads_over_ranks(degrees, heads)


def _rope_types(model_config: Mapping[str, Any]) -> set[str]:
    """The kinds of rotary embeddings; some families have one for each kind of layer."""
    given = [model_config.get(key) for key in ("rope_parameters", "rope_scaling")]
    nested = [value for item in given if isinstance(item, Mapping) for value in (item, *item.values())]
    return {str(item.get("rope_type") or item.get("type")) for item in nested if isinstance(item, Mapping)}


def _check_heads_over_ranks(degrees: Degrees, heads: int) -> None:
    """Each rank that shares a row must have whole heads in attention. Key/value heads are copied as needed."""
    tensor, context = degrees.tensor_parallel, degrees.context_parallel
    if heads % (tensor * context):
        raise UserError(
            f"parallelism.context_parallel: tensor_parallel {tensor} x context_parallel {context} = {tensor * context}"
            f" does not divide the model's {heads} attention heads",
            f"choose degrees whose product is {listed_divisors(heads)}",
        )


def check_kv_heads(tensor_parallel: int, kv_heads: int) -> None:
    """Each rank has some key/value heads, or some ranks have copies of each."""
    if kv_heads % tensor_parallel and tensor_parallel % kv_heads:
        raise UserError(
            f"parallelism.tensor_parallel: {tensor_parallel} neither divides the model's {kv_heads} key/value heads nor"
            " is a multiple of them",
            f"set it to {listed_divisors(kv_heads)}, or to a multiple of {kv_heads}",
        )


def check_shape(config: RunConfig, degrees: Degrees, shape: ModelShape) -> None:
    """Ranks that share a row have whole heads; a fused linear of queries, keys and values holds no copies of heads."""
    _check_heads_over_ranks(degrees, shape.heads)
    pipeline_cut.check_layers(config, degrees, shape.layers)
    pipeline_cut.check_targets(config, degrees, shape)
    fused = any(len(outputs) > 1 and "keys" in outputs for outputs in shape.family.columns.values())
    if fused and degrees.tensor_parallel > shape.kv_heads:
        raise UserError(
            f"parallelism.tensor_parallel: {degrees.tensor_parallel} is more than the {shape.kv_heads} key/value heads"
            f" of a {shape.model_type} model, whose queries, keys and values share one linear layer",
            f"set it to {listed_divisors(shape.kv_heads)}",
        )


def sharding(config: RunConfig, degrees: Degrees, shape: ModelShape | None) -> str:
    return sharding_choice.explain(config, degrees, shape)


def explain_pipeline(config: RunConfig, degrees: Degrees, shape: ModelShape) -> str | None:
    return pipeline_cut.explain(config, degrees, shape) if degrees.pipeline_parallel > 1 else None


def step_memory(config: RunConfig, degrees: Degrees, shape: ModelShape) -> list[Memory]:
    memory, chosen = memory_of(config, degrees, shape), sharding_choice.choose_sharding(config, degrees, shape)
    return [memory.on_rank(stage, chosen) for stage in memory.stages]
