"""What engine neuron cannot do: every limit on a setting of a run file is here, and its error begins with its key.

They are those of optimum-neuron 0.4.5 and of the libraries below it.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from hyperpod_ft.config.engine_choice import LORA_TORCH_ONLY, TORCH_OBJECTIVES, TORCH_ONLY
from hyperpod_ft.config.fields import shortened, shown
from hyperpod_ft.config.run_config import RunConfig, require_defaults
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning import trainium
from hyperpod_ft.planning.layout import Degrees, check_divides, copies_over_tensor, listed_divisors
from hyperpod_ft.planning.lora import target_names
from hyperpod_ft.planning.model_shape import ModelShape

_FAMILIES = ("llama", "qwen3", "granite")  # granite without a pipeline
# utils/cache_utils.py of optimum-neuron reads `--cache_dir=([\w\/-]+)` and silently drops the rest of the path.
_CACHE_PATH = re.compile(r"[A-Za-z0-9_/-]+")
_FLASH_ATTENTION_LENGTH = 2048  # Neuron's kernel needs a multiple of it
_TORCH_ONLY = (
    *(*TORCH_ONLY, "parallelism.sharding"),
    *("training.compile", "training.validate_every_steps", "training.save_only_model"),
)
_LORA_TORCH_ONLY = (
    *(*LORA_TORCH_ONLY, "lora.dora", "lora.modules_to_save"),
    *("model.new_tokens", "model.new_special_tokens"),
)


def check_settings(config: RunConfig) -> None:
    if not config.instance.is_neuron:
        raise UserError(
            f"cluster.instance_type: engine neuron needs a trn instance type, not {config.cluster.instance_type}",
            "choose one, or set engine: torch",
        )
    if config.training.objective != "sft":
        other = "torch" if config.training.objective in TORCH_OBJECTIVES else "trl"
        raise UserError(
            f"training.objective: only engine {other} supports {config.training.objective}",
            f"set engine: {other}, or objective sft",
        )
    if config.dataset.images:
        raise UserError("dataset.images: engine neuron trains on text only", "set engine: trl, or leave it out")
    if config.dataset.max_target_length is not None:
        raise UserError("dataset.max_target_length: only engine torch trains encoder-decoders", "set engine: torch")
    if config.eval and config.eval.python is None:
        raise UserError(
            "eval: its packages do not go with those of engine neuron",
            "set eval.python to an interpreter that has lm_eval[hf] and torch for CPUs",
        )
    _check_compilation(config)
    _check_training(config)
    if config.training.method == "lora":
        _check_lora(config)


def _check_compilation(config: RunConfig) -> None:
    """The kit sets the compile cache, which `precompile` and `train` share, and how cores are grouped (LNC)."""
    root, given = config.cluster.root, config.cluster.environment
    if root.startswith("/") and not _CACHE_PATH.fullmatch(root):  # a relative one is made absolute
        raise UserError(
            f"cluster.root: {shortened(root)}: optimum-neuron accepts only letters, digits and / _ - in the path of"
            " compiled graphs, which are kept below the root",
            "choose another root",
        )
    in_flags = re.search(r"--(cache_dir|no.cache)", given.get("NEURON_CC_FLAGS", ""))
    if "NEURON_COMPILE_CACHE_URL" in given or in_flags:
        raise UserError("cluster.environment: the kit sets the directory of the Neuron compile cache", "leave it out")
    trainium.check_grouping(config)


def _check_training(config: RunConfig) -> None:
    if config.parallelism.sequence_parallel is not None:
        raise UserError(
            "parallelism.sequence_parallel: engine neuron takes neuron.sequence_parallel instead", "set that"
        )
    require_defaults(config, _TORCH_ONLY, "only engine torch supports it")
    training, length = config.training, config.dataset.max_length
    if training.activation_checkpointing == "selective" or training.activation_checkpointing_every > 1:
        raise UserError(
            "training.activation_checkpointing: engine neuron has only none and full, for all layers", "choose one"
        )
    if config.neuron.flash_attention and length % _FLASH_ATTENTION_LENGTH:
        raise UserError(
            f"neuron.flash_attention: dataset.max_length {length} is not a multiple of {_FLASH_ATTENTION_LENGTH}",
            "change it, or leave flash_attention out",
        )


def uses_flash_attention(config: RunConfig) -> bool:
    """Whether training uses Neuron's flash attention kernel: as set, or if the rows' length allows it."""
    given = config.neuron.flash_attention
    return config.dataset.max_length % _FLASH_ATTENTION_LENGTH == 0 if given is None else given


def _check_lora(config: RunConfig) -> None:
    require_defaults(config, _LORA_TORCH_ONLY, "only engine torch supports it")
    if config.neuron.fuse_qkv:
        raise UserError("neuron.fuse_qkv: optimum-neuron does not support it with LoRA", "set it to false")
    if len({"gate_proj", "up_proj"} & config.lora.given_names) == 1:
        raise UserError(
            "lora.target_modules: gate_proj and up_proj are one matrix on engine neuron", "name both or none of them"
        )


def check_degrees(config: RunConfig, degrees: Degrees) -> None:
    if degrees.tensor_parallel > 1:
        _check_groups(config, degrees)
        _check_sequence_parallel(config, degrees)


def _check_groups(config: RunConfig, degrees: Degrees) -> None:
    """Refuse degrees whose groups of ranks neuronx-distributed cannot make.

    Read in its parallel_layers/parallel_state.py, versions 0.15 and 0.17; not tried on Trainium.
    """
    trn1 = config.instance.name.startswith("trn1")
    if trn1 and degrees.tensor_parallel == 4 and degrees.nodes % degrees.pipeline_parallel:
        # initialize_model_parallel reshapes the ranks to (PP, DP // groups of a node, 1, 4, groups of a node)
        raise UserError(
            f"parallelism.pipeline_parallel: {degrees.pipeline_parallel} does not divide cluster.nodes {degrees.nodes},"
            " as neuronx-distributed requires on trn1 with tensor_parallel 4",
            f"set it to {listed_divisors(degrees.nodes)}, or choose another tensor_parallel",
        )
    if degrees.tensor_parallel == 64 and config.env.python is None and config.env.sdk == "2.26.1":
        # ascending_descending_ring_PG_group in 0.15 makes two groups on each node, and asserts that there is one
        raise UserError(
            "parallelism.tensor_parallel: neuronx-distributed of Neuron SDK 2.26.1 fails with 64 on trn2",
            "set it to 32, or set env.sdk to 2.28.0",
        )


def _check_sequence_parallel(config: RunConfig, degrees: Degrees) -> None:
    """Sequence parallelism divides each row, and bf16 with tensor parallelism needs it."""
    tensor_parallel, length = degrees.tensor_parallel, config.dataset.max_length
    if config.neuron.sequence_parallel:
        if length % tensor_parallel:
            raise UserError(
                f"neuron.sequence_parallel: tensor_parallel {tensor_parallel} does not divide dataset.max_length"
                f" {length}",
                f"set dataset.max_length to {math.ceil(length / tensor_parallel) * tensor_parallel},"
                f" or tensor_parallel to {listed_divisors(math.gcd(length, degrees.ranks_per_node))}",
            )
    elif config.training.precision == "bf16":
        # NxD's column-parallel backward pass sums an fp32 copy of the input's gradient, then continues with the tensor
        # that was not summed (parallel_layers/layers_utils.py, _linear_autograd_bwd_grad_reduce)
        raise UserError(
            "neuron.sequence_parallel: without it, neuronx-distributed loses part of the bf16 gradients on"
            f" {tensor_parallel} tensor-parallel ranks",
            "set it to true, or set training.precision to fp32",
        )


def check_model_config(config: RunConfig, degrees: Degrees, model_config: Mapping[str, Any]) -> None:
    """Refuse a config.json whose RoPE transformers 4.57, of engine neuron, would silently replace by the default.

    transformers 5 writes `rope_parameters` instead of `rope_theta` and `rope_scaling`. It reads both.
    """
    check_family(config, degrees, str(model_config.get("model_type", "")))
    if "rope_parameters" in model_config and "rope_theta" not in model_config:
        raise UserError(
            "model.source: config.json has rope_parameters of transformers 5, which engine neuron's 4.57 ignores",
            "repeat them there as rope_theta, and as rope_scaling unless rope_type is default",
        )


def check_family(config: RunConfig, degrees: Degrees, family: str) -> None:
    if family not in _FAMILIES:
        raise UserError(
            f"model.source: engine neuron cannot train models of type {shown(family)}",
            f"choose a model of type {', '.join(_FAMILIES)}",
        )
    if family == "granite" and degrees.pipeline_parallel > 1:
        raise UserError(
            "parallelism.pipeline_parallel: optimum-neuron has no pipeline for granite models", "set it to 1"
        )


def check_kv_heads(tensor_parallel: int, kv_heads: int) -> None:
    """Key/value heads are replicated when there are fewer than ranks."""
    if kv_heads * copies_over_tensor(kv_heads, tensor_parallel) % tensor_parallel:
        raise UserError(
            f"parallelism.tensor_parallel: {tensor_parallel} and the model's {kv_heads} key/value heads:"
            " neither divides the other",
            f"choose a divisor or a multiple of {kv_heads}",
        )


def check_shape(config: RunConfig, degrees: Degrees, shape: ModelShape) -> None:
    check_divides(degrees, "vocabulary", shape.vocabulary)
    if shape.biases:
        raise UserError(
            "model.source: its linear layers have biases, which optimum-neuron does not support", "use another model"
        )
    if config.neuron.fuse_qkv and shape.heads != shape.kv_heads:
        raise UserError(
            f"neuron.fuse_qkv: needs equal numbers of heads, and the model has {shape.heads} query heads and"
            f" {shape.kv_heads} key/value heads",
            "set it to false",
        )
    targets = target_names(config.lora, shape.model_type)
    attention = {"q_proj", "k_proj", "v_proj"}
    fused = shape.kv_heads % degrees.tensor_parallel != 0
    if config.training.method == "lora" and fused and attention & targets and not attention <= targets:
        raise UserError(
            "lora.target_modules: q_proj, k_proj and v_proj are one module on engine neuron when"
            f" {shape.kv_heads} key/value heads are on {degrees.tensor_parallel} ranks",
            "name all three or none of them",
        )
