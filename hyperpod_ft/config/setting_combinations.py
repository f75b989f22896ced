"""Which settings of a run file go together, by engine. Errors name the key."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from hyperpod_ft.config.fields import shortened

if TYPE_CHECKING:
    from hyperpod_ft.config.run_config import EngineName, RunConfig

FLASH_ATTENTION_LENGTH = 2048  # Neuron's kernel needs a multiple of it

# optimum-neuron 0.4.5 (utils/cache_utils.py) reads `--cache_dir=([\w\/-]+)` and silently drops the rest of the path.
_CACHE_PATH = re.compile(r"[A-Za-z0-9_/-]+")

# Host memory that TorchNeuron would read while the program continues is not known to exist; small moments and weights
# in 4 bits are computed with table look-ups, of which it compiles some and leaves others to the CPU.
_NOT_ON_TRAINIUM = (
    "parallelism.offload",
    "training.activation_offload",
    "training.optimizer_state",
    "lora.quantization",
)
# Settings that engine neuron does not have.
_TORCH_ONLY = (
    "parallelism.context_parallel",
    "parallelism.degrees",
    "parallelism.offload",
    "parallelism.pipeline_schedule",
    "parallelism.shard_ranks",
    "parallelism.sharding",
    "parallelism.virtual_pipeline_parallel",
    "training.activation_offload",
    "training.compile",
    "training.validate_every_steps",
    "training.optimizer_state",
    "training.save_only_model",
)
_LORA_TORCH_ONLY = ("lora.dora", "lora.plus_ratio", "lora.quantization")  # matter with method lora

# Of T5: the embedding, which encoder, decoder and, in some models, the output layer share; the bias of all layers.
_SHARED_MODULES = {"shared", "embed_tokens", "lm_head", "relative_attention_bias"}


def check_combinations(config: RunConfig) -> None:
    """Raises ValueError for settings that contradict each other, or that the engine does not support."""
    if config.training.method == "full" and config.merge.dtype != "base":
        raise ValueError("merge.dtype: has no effect with training.method full; remove it")
    _check_validation(config)
    _check_benchmarks(config)
    _check_objective(config)
    _check_encoder_decoder(config)
    training = config.training
    if training.activation_checkpointing == "none" and training.activation_checkpointing_every > 1:
        raise ValueError(
            "training.activation_checkpointing_every: has no effect without activation_checkpointing; set both"
        )
    _CHECKS[config.engine](config)


def _check_benchmarks(config: RunConfig) -> None:
    if config.eval is None:
        return
    if config.sagemaker:
        raise ValueError("eval: SageMaker training jobs do not evaluate; remove section eval or section sagemaker")
    if config.eval.include_revision and not config.eval.include_path:
        raise ValueError("eval.include_revision: has no effect without include_path; remove it")
    if config.engine == "neuron" and config.eval.python is None:
        raise ValueError(
            "eval: its packages do not go with those of engine neuron; set eval.python to an interpreter that has"
            " lm_eval[hf] and torch for CPUs"
        )


def _check_validation(config: RunConfig) -> None:
    """Validation needs held-out rows and somewhere to save; what chooses between steps needs several validations."""
    training = config.training
    if training.validate_every_steps and not config.dataset.validation_share:
        raise ValueError(
            "training.validate_every_steps: dataset.validation_share 0 holds out no rows; raise it, for example to 0.02"
        )
    for key in ("keep_best", "early_stopping_patience"):
        if getattr(training, key) and not training.validate_every_steps:
            raise ValueError(f"training.{key}: needs validation losses; set training.validate_every_steps")
    if training.weights_dtype != "fp32" and not (training.keep_best or training.save_only_model):
        raise ValueError("training.weights_dtype: has no effect without keep_best or save_only_model; remove it")


def _check_objective(config: RunConfig) -> None:
    """Preferences and DPO need each other, and both documents of a pair in one forward pass of one rank."""
    dpo, dataset, parallelism = config.training.objective == "dpo", config.dataset, config.parallelism
    if dpo != (dataset.format == "preference"):
        raise ValueError(
            f"training.objective: {config.training.objective} does not train on dataset.format {dataset.format};"
            " objective dpo and format preference go together"
        )
    if not dpo:
        if config.dpo != type(config.dpo)():
            raise ValueError("dpo: has no effect without training.objective dpo; remove it")
        return
    if config.engine != "torch":
        raise ValueError("training.objective: only engine torch supports dpo; set engine: torch, or objective sft")
    if dataset.packing == "wrapped":
        raise ValueError("dataset.packing: wrapped would cut pairs; use bfd or none for format preference")
    if dataset.loss_on != "completion":
        raise ValueError("dataset.loss_on: the prompt of a pair cancels in DPO's loss; leave it at completion")
    if config.instance.is_neuron:
        raise ValueError(
            "training.objective: dpo has shapes that differ from batch to batch, and TorchNeuron would compile for"
            " each; use a GPU instance type"
        )
    for degree, reason in (
        ("pipeline_parallel", "does not support pipelines"),
        ("context_parallel", "needs all tokens of a pair on one rank"),
    ):
        if getattr(parallelism, degree) > 1:
            raise ValueError(
                f"parallelism.{degree}: objective dpo {reason}; set it to 1, and divide the model with tensor_parallel"
                " and sharding"
            )


def _check_encoder_decoder(config: RunConfig) -> None:
    if config.dataset.max_target_length is None:
        return
    if config.engine != "torch":
        raise ValueError("dataset.max_target_length: only engine torch trains encoder-decoders; set engine: torch")
    for key in ("pipeline_parallel", "context_parallel"):
        if getattr(config.parallelism, key) > 1:
            raise ValueError(f"parallelism.{key}: not available for encoder-decoders; set it to 1")
    if config.parallelism.sequence_parallel:
        raise ValueError("parallelism.sequence_parallel: not available for encoder-decoders; remove it")
    if unsuitable := config.lora.given_names & _SHARED_MODULES:
        raise ValueError(
            f"lora.target_modules: {min(unsuitable)} of an encoder-decoder cannot have an adapter; name linear modules"
            " of attention and MLP, such as q, k, v, o, wi_0, wi_1, wo"
        )


def _check_torch(config: RunConfig) -> None:
    if config.cluster.instance_type.startswith("trn1"):
        raise ValueError("engine torch does not run on trn1: TorchNeuron needs trn2; use engine: neuron")
    if config.instance.is_neuron:
        _check_torch_neuron(config)
    given = config.parallelism
    if given.degrees == "auto":
        for key, default in (("tensor_parallel", None), ("pipeline_parallel", 1), ("context_parallel", 1)):
            if getattr(given, key) != default:
                raise ValueError(f"parallelism.{key}: parallelism.degrees auto chooses it; remove one of them")
    elif given.pipeline_parallel == 1 and given.pipeline_schedule != "1f1b":
        raise ValueError(
            "parallelism.pipeline_schedule: has no effect without a pipeline; remove it, or set pipeline_parallel"
        )
    stages_on_rank = given.virtual_pipeline_parallel
    if given.pipeline_schedule != "interleaved" and stages_on_rank != type(given)().virtual_pipeline_parallel:
        raise ValueError(
            "parallelism.virtual_pipeline_parallel: has no effect without pipeline_schedule interleaved; remove it, or"
            " set that schedule"
        )
    if given.offload == "parameters" and given.sharding not in ("auto", "zero3"):
        raise ValueError(
            f"parallelism.offload: parameters needs sharding zero3, not {given.sharding}; set sharding to zero3, or"
            " leave it out"
        )
    if given.sharding == "replicated" and (given.shard_ranks or 1) > 1:
        raise ValueError("parallelism.shard_ranks: has no effect with sharding replicated; leave one of them out")
    if config.lora.quantization != "none":
        if config.training.method != "lora":
            raise ValueError("lora.quantization: has no effect with training.method full; remove it")
        if (config.parallelism.tensor_parallel or 1) > 1:
            raise ValueError(
                "lora.quantization: a weight in 4 bits cannot be divided; set parallelism.tensor_parallel to 1"
            )


def _check_torch_neuron(config: RunConfig) -> None:
    """What engine torch does not support on Trainium."""
    _check_neuron_variables(config)
    if config.lora.dropout and config.training.activation_checkpointing != "none":
        raise ValueError(
            "lora.dropout: with activation_checkpointing, compiled layers keep the state of a random generator, which"
            " engine torch avoids on trn2; set dropout to 0, or activation_checkpointing to none"
        )
    _require_defaults(config, _NOT_ON_TRAINIUM, "engine torch does not support it on trn2")


def _require_defaults(config: RunConfig, keys: Iterable[str], reason: str) -> None:
    """Raises ValueError, with the reason, for a key whose value is neither its default nor false."""
    for key in keys:
        section_name, name = key.split(".")
        section = getattr(config, section_name)
        value, default = getattr(section, name), type(section).model_fields[name].default
        if value not in (default, False):
            remedy = "leave it out" if default is None else f"set it to {str(default).lower()} or leave it out"
            raise ValueError(f"{key}: {reason}; {remedy}")


def _check_neuron(config: RunConfig) -> None:
    if not config.instance.is_neuron:
        raise ValueError(f"engine neuron needs a trn instance type, not {config.cluster.instance_type}")
    _check_compilation(config)
    _check_torch_only(config)
    if config.neuron.flash_attention and config.dataset.max_length % FLASH_ATTENTION_LENGTH:
        raise ValueError(
            f"neuron.flash_attention: dataset.max_length {config.dataset.max_length} is not a multiple of"
            f" {FLASH_ATTENTION_LENGTH}; change it, or leave flash_attention out"
        )
    if config.training.method != "lora":
        return
    _require_defaults(config, _LORA_TORCH_ONLY, "only engine torch supports it")
    if config.neuron.fuse_qkv:
        raise ValueError("neuron.fuse_qkv: optimum-neuron does not support it with LoRA; set it to false")
    if len({"gate_proj", "up_proj"} & config.lora.given_names) == 1:
        raise ValueError(
            "lora.target_modules: gate_proj and up_proj are one matrix on engine neuron; name both or none of them"
        )


def _check_torch_only(config: RunConfig) -> None:
    if config.parallelism.sequence_parallel is not None:
        raise ValueError("parallelism.sequence_parallel: engine neuron has neuron.sequence_parallel; set that instead")
    _require_defaults(config, _TORCH_ONLY, "only engine torch supports it")
    training = config.training
    if training.activation_checkpointing == "selective" or training.activation_checkpointing_every > 1:
        raise ValueError(
            "training.activation_checkpointing: engine neuron has only none and full, for all layers; choose one"
        )
    if config.store and config.cluster.nodes > 1:
        raise ValueError(
            "sagemaker.store: with engine neuron, several nodes write their checkpoints to one shared volume; set"
            " sagemaker.file_system instead"
        )


def _check_compilation(config: RunConfig) -> None:
    """The kit sets the compile cache, which `precompile` and `train` share, and how cores are grouped (LNC)."""
    root, given = config.cluster.root, config.cluster.environment
    flags = given.get("NEURON_CC_FLAGS", "")
    # a relative one is checked again when it is resolved
    if root.startswith("/") and not _CACHE_PATH.fullmatch(root):
        raise ValueError(
            f"cluster.root: {shortened(root)}: optimum-neuron accepts only letters, digits and / _ - in the path of"
            " compiled graphs, which are kept below the root; choose another root"
        )
    if "NEURON_COMPILE_CACHE_URL" in given or re.search(r"--(cache_dir|no.cache)", flags):
        raise ValueError("cluster.environment: the kit sets the directory of the Neuron compile cache; leave it out")
    _check_grouping(config)


def _check_neuron_variables(config: RunConfig) -> None:
    """The kit sets how cores are grouped (LNC), and the cache that `precompile` and `train` share."""
    given = config.cluster.environment
    if {"TORCH_NEURONX_NEFF_CACHE_DIR", "TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR", "TORCH_NEURONX_DEBUG_DIR"} & given.keys():
        raise ValueError("cluster.environment: the kit sets the directories of compiled graphs; leave them out")
    if given.get("TORCH_NEURONX_NEFF_DISABLE_CACHE", "0").lower() not in ("", "0", "false", "no"):
        raise ValueError("cluster.environment: stage precompile needs the cache of compiled graphs; leave it on")
    _check_grouping(config)


def _check_grouping(config: RunConfig) -> None:
    given = config.cluster.environment
    grouping = {"NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE"} & given.keys()
    if grouping or re.search(r"--(lnc|logical.nc.config)\b", given.get("NEURON_CC_FLAGS", "")):
        raise ValueError(
            "cluster.environment: the kit sets how NeuronCores are grouped (LNC), by the instance type; leave it out"
        )


_CHECKS: dict[EngineName, Callable[[RunConfig], None]] = {"torch": _check_torch, "neuron": _check_neuron}
