"""What engine torch cannot do: every limit on a setting of a run file is here, and its error begins with its key.

Other limits than the devices' are those of what was built or verified: docs/parallelism.md and docs/engines.md.
"""

import math
from collections.abc import Mapping
from typing import Any

from hyperpod_ft.checkpoint.formats.model_directory import decoder_start, is_encoder_decoder, of_language_model
from hyperpod_ft.config.engine_choice import TORCH_OBJECTIVES
from hyperpod_ft.config.fields import shown
from hyperpod_ft.config.run_config import RunConfig, require_defaults
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning import trainium
from hyperpod_ft.planning.families import (
    ENCODER_DECODERS,
    NOT_CAUSAL,
    Family,
    divisible_types,
    family_of,
)
from hyperpod_ft.planning.layout import Degrees, Sharding, listed_divisors
from hyperpod_ft.planning.lora import adapted_linears, check_new_tokens
from hyperpod_ft.planning.model_shape import ModelShape, attention_heads
from hyperpod_ft.planning.torch.memory import has_sequence_parallel
from hyperpod_ft.planning.torch.pipeline import idle_share, stages_per_rank
from hyperpod_ft.planning.torch.sharding import candidates
from hyperpod_ft.planning.undivided.files import expert_count

# Host memory that TorchNeuron would read while the program continues is not known to exist; small moments and weights
# in 4 bits are computed with table look-ups, of which it compiles some and leaves others to the CPU. How many tokens an
# expert gets differs from step to step, and so do the lengths of answers.
_NOT_ON_TRAINIUM = (
    "parallelism.expert_parallel",
    "parallelism.offload",
    "training.activation_offload",
    "training.optimizer_state",
    "training.validate_rouge_rows",
    "lora.quantization",
)
# Of T5: the embedding, which encoder, decoder and, in some models, the output layer share; the bias of all layers.
_SHARED_MODULES = {"shared", "embed_tokens", "lm_head", "relative_attention_bias"}


def check_settings(config: RunConfig) -> None:
    if config.cluster.instance_type.startswith("trn1"):
        raise UserError(
            "cluster.instance_type: engine torch does not run on trn1",
            "choose trn2, which TorchNeuron needs, or use engine: neuron",
        )
    if config.training.objective not in TORCH_OBJECTIVES:
        raise UserError(f"training.objective: engine torch has no {config.training.objective}", "set engine: trl")
    if config.dataset.images:
        raise UserError("dataset.images: engine torch trains on text only", "set engine: trl, or leave it out")
    if config.training.objective == "dpo":
        _check_preferences(config)
    if config.dataset.max_target_length is not None:
        _check_encoder_decoder(config)
    if config.instance.is_neuron:
        _check_trainium(config)
    _check_parallelism(config)
    check_new_tokens(config)
    if config.lora.quantization != "none":
        if config.training.method != "lora":
            raise UserError("lora.quantization: has no effect with training.method full", "remove it")
        if (config.parallelism.tensor_parallel or 1) > 1:
            raise UserError(
                "lora.quantization: a weight in 4 bits cannot be divided", "set parallelism.tensor_parallel to 1"
            )


def _check_preferences(config: RunConfig) -> None:
    """Both documents of a pair are in one forward pass of one rank."""
    if config.instance.is_neuron:
        raise UserError(
            "training.objective: the shapes of dpo differ from batch to batch, and TorchNeuron would compile for each",
            "use a GPU instance type",
        )
    for degree, reason in (
        ("pipeline_parallel", "does not support pipelines"),
        ("context_parallel", "needs all tokens of a pair on one rank"),
    ):
        if getattr(config.parallelism, degree) > 1:
            raise UserError(
                f"parallelism.{degree}: objective dpo {reason}",
                "set it to 1, and divide the model with tensor_parallel and sharding",
            )


def _check_encoder_decoder(config: RunConfig) -> None:
    for key in ("pipeline_parallel", "context_parallel"):
        if getattr(config.parallelism, key) > 1:
            raise UserError(f"parallelism.{key}: engine torch does not offer it for encoder-decoders", "set it to 1")
    if config.parallelism.sequence_parallel:
        raise UserError(
            "parallelism.sequence_parallel: engine torch does not offer it for encoder-decoders", "remove it"
        )
    if config.lora.modules_to_save:
        raise UserError("lora.modules_to_save: engine torch does not offer it for encoder-decoders", "remove it")
    if unsuitable := config.lora.given_names & _SHARED_MODULES:
        raise UserError(
            f"lora.target_modules: {min(unsuitable)} of an encoder-decoder cannot have an adapter",
            "name linear modules of attention and MLP, such as q, k, v, o, wi_0, wi_1, wo",
        )


def _check_trainium(config: RunConfig) -> None:
    """The kit sets how cores are grouped (LNC), and the cache that `precompile` and `train` share."""
    given = config.cluster.environment
    if {"TORCH_NEURONX_NEFF_CACHE_DIR", "TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR", "TORCH_NEURONX_DEBUG_DIR"} & given.keys():
        raise UserError("cluster.environment: the kit sets the directories of compiled graphs", "leave them out")
    if given.get("TORCH_NEURONX_NEFF_DISABLE_CACHE", "0").lower() not in ("", "0", "false", "no"):
        raise UserError("cluster.environment: stage precompile needs the cache of compiled graphs", "leave it on")
    trainium.check_grouping(config)
    if config.lora.dropout and config.training.activation_checkpointing != "none":
        raise UserError(
            "lora.dropout: with activation_checkpointing, compiled layers keep the state of a random generator, which"
            " engine torch avoids on trn2",
            "set dropout to 0, or activation_checkpointing to none",
        )
    require_defaults(config, _NOT_ON_TRAINIUM, "engine torch does not support it on trn2")


def _check_parallelism(config: RunConfig) -> None:
    given = config.parallelism
    if given.degrees == "auto":
        for key in ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel"):
            if getattr(given, key) != getattr(type(given)(), key):
                raise UserError(f"parallelism.{key}: parallelism.degrees auto sets it", "remove one of them")
    elif given.pipeline_parallel == 1 and given.pipeline_schedule != "1f1b":
        raise UserError(
            "parallelism.pipeline_schedule: has no effect without a pipeline", "remove it, or set pipeline_parallel"
        )
    stages_on_rank = given.virtual_pipeline_parallel
    if given.pipeline_schedule != "interleaved" and stages_on_rank != type(given)().virtual_pipeline_parallel:
        raise UserError(
            "parallelism.virtual_pipeline_parallel: has no effect without pipeline_schedule interleaved",
            "remove it, or set that schedule",
        )
    if given.offload == "parameters" and given.sharding not in ("auto", "zero3"):
        raise UserError(
            f"parallelism.offload: parameters needs sharding zero3, not {given.sharding}",
            "set sharding to zero3, or leave it out",
        )
    adapts_experts = config.training.method == "lora" and (config.lora.target_parameters or config.model.adapter)
    if given.expert_parallel > 1 and config.training.optimizer_state == "int8" and adapts_experts:
        raise UserError(
            "training.optimizer_state: int8 has one scale for the adapters of several experts, which"
            " parallelism.expert_parallel divides",
            "set it to fp32, or expert_parallel to 1",
        )
    if given.sharding == "replicated" and (given.shard_ranks or 1) > 1:
        raise UserError("parallelism.shard_ranks: has no effect with sharding replicated", "leave one of them out")


def check_degrees(config: RunConfig, degrees: Degrees) -> None:
    """All that divide the ranks can be trained, on rows that they divide; on Trainium those without a pipeline."""
    if degrees.pipeline_parallel > 1:
        _check_pipeline(config, degrees)
    length, context, tensor = config.dataset.max_length, degrees.context_parallel, degrees.tensor_parallel
    if length % context:
        raise UserError(
            f"parallelism.context_parallel: {context} does not divide dataset.max_length {length}",
            f"set max_length to {-(-length // context) * context}, or context_parallel to a divisor of {length}",
        )
    if config.parallelism.sequence_parallel and tensor > 1 and not has_sequence_parallel(config, degrees):
        on_rank = " on each rank" if context > 1 else ""
        raise UserError(
            f"parallelism.sequence_parallel: tensor_parallel {tensor} does not divide the {length // context} tokens of"
            f" a row{on_rank}",
            f"set dataset.max_length to a multiple of {tensor * context}, or leave it out",
        )
    shard_ranks, replicas = config.parallelism.shard_ranks, degrees.weight_replicas
    if shard_ranks and replicas % shard_ranks:
        raise UserError(
            f"parallelism.shard_ranks: {shard_ranks} does not divide the {replicas} data-parallel ranks",
            f"set it to {listed_divisors(replicas)}, or leave it out",
        )
    experts = degrees.expert_parallel
    if replicas % experts:
        raise UserError(
            f"parallelism.expert_parallel: {experts} does not divide the {replicas} data-parallel ranks",
            f"set it to {listed_divisors(replicas)}",
        )
    if shard_ranks and not degrees.can_shard_experts(shard_ranks):
        raise UserError(
            f"parallelism.shard_ranks: {shard_ranks} neither divides expert_parallel {experts} nor is a multiple of it",
            f"set it to {experts}, or leave it out",
        )
    check_whole_weights(config, degrees, next(candidates(config, degrees)))


def check_whole_weights(config: RunConfig, degrees: Degrees, sharding: Sharding) -> None:
    """Each rank answers validation samples of its own. Raises UserError where it lacks the weights for that."""
    divides = sharding.by_layer or degrees.tensor_parallel > 1
    if config.training.validate_rouge_rows and divides:
        divided = f"sharding is {sharding}" if sharding.by_layer else f"tensor_parallel is {degrees.tensor_parallel}"
        raise UserError(
            f"training.validate_rouge_rows: needs whole weights on each rank, and parallelism.{divided}",
            "remove it, or set tensor_parallel to 1 and sharding to zero1, without offload: parameters",
        )


def _check_pipeline(config: RunConfig, degrees: Degrees) -> None:
    """Refuse numbers of micro batches that leave ranks idle for long, or that the schedule cannot divide."""
    ranks, count = degrees.pipeline_parallel, config.training.gradient_accumulation_steps
    if config.instance.is_neuron:
        raise UserError(
            "parallelism.pipeline_parallel: engine torch does not support pipelines on trn2 (not verified with"
            " TorchNeuron)",
            "set it to 1",
        )
    if count < ranks:
        raise UserError(
            f"training.gradient_accumulation_steps: too few micro batches ({count}) for {ranks} pipeline parts, which"
            f" would be idle {idle_share(config, degrees):.0%} of the time",
            f"set it to at least {ranks}; {4 * ranks} would leave them idle"
            f" {(ranks - 1) / (stages_per_rank(config) * 4 * ranks + ranks - 1):.0%} of the time",
        )
    if config.parallelism.pipeline_schedule == "interleaved" and count % (count // ranks):
        # they go through a rank's stages in rounds of one size (torch's ScheduleInterleaved1F1B)
        raise UserError(
            f"training.gradient_accumulation_steps: schedule interleaved cannot divide {count} micro batches into"
            f" {count // ranks} equal rounds for {ranks} pipeline ranks",
            f"set it to a multiple of {ranks}",
        )


def check_model_config(config: RunConfig, degrees: Degrees, model_config: Mapping[str, Any]) -> None:
    """transformers 5 reads every spelling of config.json; divided rows need positions that count alike everywhere."""
    model_config = of_language_model(model_config)
    family = str(model_config.get("model_type", ""))
    _check_kind(config, family, model_config)
    check_family(config, degrees, family)
    if degrees.expert_parallel > 1:
        _check_experts(degrees, family, model_config)
    if model_config.get("output_router_logits"):
        _check_router_loss(config, degrees)
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


def _check_experts(degrees: Degrees, family: str, model_config: Mapping[str, Any]) -> None:
    """Stage certify finds out whether the model's class computes them in a way that can be divided."""
    ranks, experts = degrees.expert_parallel, expert_count(model_config)
    if not experts:
        raise UserError(
            f"parallelism.expert_parallel: this {shown(family)} model's config.json names no number of experts",
            "set it to 1",
        )
    if experts % ranks:
        raise UserError(
            f"parallelism.expert_parallel: {ranks} does not divide the model's {experts} experts",
            f"set it to {listed_divisors(math.gcd(experts, degrees.weight_replicas))}",
        )


def _check_router_loss(config: RunConfig, degrees: Degrees) -> None:
    """The load-balancing loss of routers is not a sum over tokens: a forward pass has all tokens of its rows."""
    remedy = "output_router_logits to false in the model's config.json, to train without that loss"
    if degrees.context_parallel > 1:
        raise UserError(
            "parallelism.context_parallel: the model's config.json asks for the router's load-balancing loss, which"
            " needs all tokens of a row on one rank",
            f"set it to 1, or {remedy}",
        )
    if config.instance.is_neuron:  # layers, each one graph there, would have to give out what they compute within
        raise UserError(
            "model.source: its config.json asks for the router's load-balancing loss, which engine torch does not"
            " compute on trn2",
            f"use a GPU instance type, or set {remedy}",
        )


def _check_kind(config: RunConfig, family: str, model_config: Mapping[str, Any]) -> None:
    """Refuse an encoder-decoder for a run file that is for another model, or the reverse."""
    family, target_length = family or "(none)", config.dataset.max_target_length
    if not is_encoder_decoder(model_config):
        if target_length is not None:
            raise UserError(
                f"dataset.max_target_length: only for encoder-decoders, and a {family} model is not one", "remove it"
            )
        return
    if family not in ENCODER_DECODERS:
        raise UserError(
            f"model.source: encoder-decoders of type {family} cannot be trained",
            f"use one of type {ENCODER_DECODERS[0]}",
        )
    if target_length is None:
        raise UserError(
            f"dataset.max_target_length: required, since a model of type {family} is an encoder-decoder",
            "set it to the length of the decoder's part of a row, for example 128",
        )
    decoder_start(model_config)


def _rope_types(model_config: Mapping[str, Any]) -> set[str]:
    """The kinds of rotary embeddings; some families have one for each kind of layer."""
    given = [model_config.get(key) for key in ("rope_parameters", "rope_scaling")]
    nested = [value for item in given if isinstance(item, Mapping) for value in (item, *item.values())]
    return {str(item.get("rope_type") or item.get("type")) for item in nested if isinstance(item, Mapping)}


def check_family(config: RunConfig, degrees: Degrees, family: str) -> None:
    """Any family of transformers' causal models trains; dividing one needs to know it."""
    if family in NOT_CAUSAL:
        raise UserError(
            f"model.source: models of type {family} are not causal language models",
            "choose a causal language model, or a T5",
        )
    if degrees.pipeline_parallel > 1 and family_of(family) is None:
        raise UserError(
            f"parallelism.pipeline_parallel: engine torch cannot cut models of type {shown(family)} into parts",
            f"set it to 1; it cuts {divisible_types()}",
        )
    if family in ENCODER_DECODERS:  # the engine computes all their attention; check_settings has the rest
        if config.instance.is_neuron:
            raise UserError(
                f"model.source: engine torch does not train {family} models on trn2 (not verified with TorchNeuron)",
                "choose a causal language model, or an instance type with GPUs",
            )
        return
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


def check_kv_heads(tensor_parallel: int, kv_heads: int) -> None:
    """Each rank has some key/value heads, or some ranks have copies of each."""
    if kv_heads % tensor_parallel and tensor_parallel % kv_heads:
        raise UserError(
            f"parallelism.tensor_parallel: {tensor_parallel} neither divides the model's {kv_heads} key/value heads nor"
            " is a multiple of them",
            f"set it to {listed_divisors(kv_heads)}, or to a multiple of {kv_heads}",
        )


def _check_heads_over_ranks(degrees: Degrees, heads: int) -> None:
    """Each rank that shares a row must have whole heads in attention. Key/value heads are copied as needed."""
    tensor, context = degrees.tensor_parallel, degrees.context_parallel
    if heads % (tensor * context):
        raise UserError(
            f"parallelism.context_parallel: tensor_parallel {tensor} x context_parallel {context} = {tensor * context}"
            f" does not divide the model's {heads} attention heads",
            f"choose degrees whose product is {listed_divisors(heads)}",
        )


def check_shape(config: RunConfig, degrees: Degrees, shape: ModelShape) -> None:
    """A fused linear of queries, keys and values holds no copies of heads."""
    _check_heads_over_ranks(degrees, shape.heads)
    if degrees.pipeline_parallel > 1:
        _check_stages(config, degrees, shape)
    fused = any(len(outputs) > 1 and "keys" in outputs for outputs in shape.family.columns.values())
    if fused and degrees.tensor_parallel > shape.kv_heads:
        raise UserError(
            f"parallelism.tensor_parallel: {degrees.tensor_parallel} is more than the {shape.kv_heads} key/value heads"
            f" of a {shape.model_type} model, whose queries, keys and values share one linear layer",
            f"set it to {listed_divisors(shape.kv_heads)}",
        )


def _check_stages(config: RunConfig, degrees: Degrees, shape: ModelShape) -> None:
    """Each stage of a pipeline has a layer, and trains something."""
    ranks, on_rank = degrees.pipeline_parallel, stages_per_rank(config)
    if shape.layers < ranks * on_rank:
        raise UserError(
            f"parallelism.virtual_pipeline_parallel: {ranks} ranks x {on_rank} parts = {ranks * on_rank} for"
            f" {shape.layers} layers",
            f"lower it or pipeline_parallel, so that there are at most {shape.layers}",
        )
    if config.training.method == "lora" and not adapted_linears(config.lora, shape):
        raise UserError(
            "lora.target_modules: names no module of the layers, so pipeline parts would train nothing",
            "name some, or set parallelism.pipeline_parallel to 1",
        )
