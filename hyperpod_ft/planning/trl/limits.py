"""What engine trl cannot do: every limit on a setting of a run file is here, and its error begins with its key.

They are those of TRL 1.16 and accelerate 1.15, and of what the kit has tried with them.
"""

from collections.abc import Mapping
from typing import Any

from hyperpod_ft.checkpoint.formats.model_directory import EMBEDDINGS, is_encoder_decoder, of_language_model
from hyperpod_ft.config.engine_choice import LORA_TORCH_ONLY, TORCH_ONLY
from hyperpod_ft.config.fields import shown
from hyperpod_ft.config.run_config import RunConfig, require_defaults
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.families import IMAGE_TOWERS, NOT_CAUSAL
from hyperpod_ft.planning.layout import Degrees
from hyperpod_ft.planning.memory import GIB, RESERVED
from hyperpod_ft.planning.model_shape import ModelShape
from hyperpod_ft.planning.trl import settings

# vLLM has classes of its own for them; for others it takes transformers', and changes them for the training too.
_OF_VLLM = ("llama", "mistral", "granite", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3")
IMAGE_FAMILIES = ("gemma3", "qwen3_vl")  # types that read images
_TORCH_ONLY = (
    *(*TORCH_ONLY, "parallelism.pipeline_parallel", "model.new_tokens", "model.new_special_tokens"),
    *("training.activation_checkpointing_every", "training.async_save", "training.weights_dtype"),
)


def check_settings(config: RunConfig) -> None:
    if config.instance.is_neuron:
        raise UserError(
            f"cluster.instance_type: engine trl does not run on {config.cluster.instance_type}",
            "choose an instance type with GPUs, or set engine: torch or neuron",
        )
    if config.training.objective == "dpo":
        _check_preferences(config)
    if config.training.objective == "kto":
        _check_mismatches(config)
    if config.dataset.max_target_length is not None:
        raise UserError("dataset.max_target_length: only engine torch trains encoder-decoders", "set engine: torch")
    if config.training.compile is not None:
        raise UserError("training.compile: engine trl compiles the whole model or nothing", "set trl.torch_compile")
    if config.training.activation_checkpointing == "selective":
        raise UserError("training.activation_checkpointing: engine trl has only none and full", "choose one")
    _check_parallelism(config)
    require_defaults(config, _TORCH_ONLY, "only engine torch supports it")
    if config.training.method == "lora":
        _check_lora(config)
    if config.dataset.images:
        if config.training.method == "full":
            raise UserError("training.method: full has not been tried with dataset.images", "set it to lora")
        require_defaults(config, ("lora.modules_to_save",), "has not been tried with dataset.images")
    settings.check(config.training.objective, config.trl)
    _check_vllm(config)


def _check_vllm(config: RunConfig) -> None:
    given = config.trl.get("vllm_gpu_memory_utilization")
    if given is not None and not config.trl.get("use_vllm"):
        raise UserError("trl: vllm_gpu_memory_utilization has no effect without use_vllm", "set both")
    if given is not None and not 0 < given < 1 - RESERVED:
        raise UserError(
            f"trl: vllm_gpu_memory_utilization is {given}",
            f"set it to a share of the GPU's memory, as 0.3: training needs some of the {1 - RESERVED:g}",
        )
    if not config.vllm_share:
        return
    if not config.instance.has_accelerators:
        raise UserError(
            "trl: use_vllm needs GPUs: on CPUs, vLLM rearranges its weights, so that TRL cannot update them",
            "remove it: transformers samples the answers",
        )
    if "generation_kwargs" in config.trl:
        raise UserError("trl: generation_kwargs are transformers', which use_vllm replaces", "remove one of them")


def _check_parallelism(config: RunConfig) -> None:
    given = config.parallelism
    if (given.tensor_parallel or 1) > 1:
        raise UserError("parallelism.tensor_parallel: only engine torch supports it on GPUs", "set it to 1")
    if given.sequence_parallel:
        raise UserError("parallelism.sequence_parallel: has no effect with engine trl", "remove it")
    if given.sharding == "zero1":
        raise UserError(
            "parallelism.sharding: accelerate, with which TRL shards, has no zero1",
            "set it to zero2, or set engine: torch",
        )
    if given.sharding in ("zero2", "zero3"):
        if not config.instance.has_accelerators:
            raise UserError(
                f"parallelism.sharding: {given.sharding}: accelerate shards on accelerators only, not on CPUs",
                "leave it out, or set engine: torch",
            )
        if why := settings.unsharded(config):
            raise UserError(f"parallelism.sharding: {given.sharding}: {why}", "leave it out")


def _check_preferences(config: RunConfig) -> None:
    """TRL averages over the pairs of a forward pass, so each must have as many; its loss has no label smoothing."""
    if config.dataset.packing != "none":
        raise UserError(
            "dataset.packing: engine trl needs one pair a row for objective dpo", "set it to none, or set engine: torch"
        )
    require_defaults(config, ("dpo.label_smoothing",), "only engine torch supports it")


def _check_mismatches(config: RunConfig) -> None:
    if config.training.micro_batch_size < settings.least_rows(config.training.objective, config.trl):
        raise UserError(
            "training.micro_batch_size: objective kto needs several rows in a forward pass, to estimate the KL"
            " divergence from completions of other prompts",
            "set it to 2 or more, or set trl: {loss_type: apo_zero_unpaired}",
        )


def _check_lora(config: RunConfig) -> None:
    require_defaults(config, LORA_TORCH_ONLY, "only engine torch supports it")
    by_transformers = config.training.samples_answers and not config.vllm_share
    if by_transformers and config.training.precision == "bf16" and config.lora.modules_to_save:
        raise UserError(
            "lora.modules_to_save: TRL samples answers without autocast, in which modules trained whole are fp32",
            "leave it out, or set training.precision: fp32",
        )
    if ends := sorted(config.lora.given_names & {*EMBEDDINGS, "lm_head"}):
        raise UserError(
            f"lora.target_modules: TRL does not train an adapter of {ends[0]}",
            "remove it, name it in lora.modules_to_save, or set engine: torch",
        )


def check_degrees(config: RunConfig, degrees: Degrees) -> None:
    """All ranks are data-parallel."""
    training = config.training
    answers = training.micro_batch_size * training.gradient_accumulation_steps * degrees.data_parallel
    if answers % config.answers_per_prompt:
        raise UserError(
            f"sampling.generations: {config.sampling.generations} does not divide the {answers} answers of a step"
            " (training.micro_batch_size x gradient_accumulation_steps x data-parallel ranks)",
            "change one of them",
        )


def check_model_config(config: RunConfig, degrees: Degrees, model_config: Mapping[str, Any]) -> None:
    family = str(model_config.get("model_type", ""))
    if config.dataset.images and family not in IMAGE_FAMILIES:
        raise UserError(
            f"dataset.images: engine trl has not been tried with images for models of type {shown(family)}",
            f"choose a model of type {', '.join(IMAGE_FAMILIES)}, or leave it out",
        )
    if config.lora.image_tower and family not in IMAGE_TOWERS:
        raise UserError(
            f"lora.image_tower: engine trl has not been tried with the tower of type {shown(family)}",
            f"leave it out, or choose a model of type {', '.join(IMAGE_TOWERS)}",
        )
    _check_causal("model.source", model_config)
    check_family(config, degrees, family)
    if of_language_model(model_config).get("output_router_logits"):
        raise UserError(
            "model.source: its config.json asks for the router's load-balancing loss, which engine trl does not train",
            "set output_router_logits to false there, or set engine: torch",
        )
    if config.training.samples_answers:
        _check_positions(config, "the model", model_config)


def check_teacher(config: RunConfig, model_config: Mapping[str, Any]) -> None:
    """`model_config`: the teacher's config.json."""
    _check_causal("teacher.source", model_config)
    _check_positions(config, "the teacher", model_config)


def _check_positions(config: RunConfig, whose: str, model_config: Mapping[str, Any]) -> None:
    length, answer = config.dataset.max_length, config.sampling.max_completion_length
    positions = of_language_model(model_config).get("max_position_embeddings")
    if isinstance(positions, int) and length + answer > positions:
        raise UserError(
            f"sampling.max_completion_length: an answer of {answer} tokens after a prompt of {length}"
            f" (dataset.max_length) is longer than {whose}'s {positions} positions",
            "make one of them smaller",
        )


def check_family(config: RunConfig, degrees: Degrees, family: str) -> None:
    """Stage certify finds out whether the type can be trained."""
    if config.vllm_share and family not in _OF_VLLM:
        raise UserError(
            f"trl: use_vllm has not been tried with models of type {shown(family)}",
            f"remove it, or choose a model of type {', '.join(_OF_VLLM)}",
        )


def _check_causal(key: str, model_config: Mapping[str, Any]) -> None:
    family = str(model_config.get("model_type", ""))
    if family in NOT_CAUSAL or is_encoder_decoder(model_config):
        raise UserError(f"{key}: models of type {shown(family)} are not causal language models", "choose one that is")


def check_kv_heads(tensor_parallel: int, kv_heads: int) -> None:
    """There is no tensor parallelism."""


def check_shape(config: RunConfig, degrees: Degrees, shape: ModelShape) -> None:
    """The model is whole on every rank."""
    if shape.softcap and settings.attention(config) == "sdpa":
        raise UserError(
            f"trl: attention sdpa leaves out the soft cap or the sinks of {shape.model_type} models",
            "set trl: {model_init_kwargs: {attn_implementation: eager}}",
        )
    if config.vllm_share:
        _check_vllm_share(config, shape)


def _check_vllm_share(config: RunConfig, shape: ModelShape) -> None:
    """vLLM has the model, and keys and values of an answer with its prompt at least, in bf16."""
    positions = config.dataset.max_length + config.sampling.max_completion_length
    needed = 2 * (shape.parameters + 2 * positions * shape.layers * shape.key_width)
    share = config.vllm_share * config.instance.rank_gib * GIB
    if needed > share:
        raise UserError(
            f"trl: vllm_gpu_memory_utilization {config.vllm_share:g} is {share / GIB:.1f} GiB of a GPU, and vLLM needs"
            f" more than {needed / GIB:.1f} GiB for the model and an answer",
            "raise it, or choose a smaller model",
        )
