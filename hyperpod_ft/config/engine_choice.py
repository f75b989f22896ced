"""Which engine `engine: auto` is: trl for what engine torch does not have, else torch, which is faster."""

from hyperpod_ft.config.run_config import EngineName, RunConfig

TORCH_OBJECTIVES = ("sft", "dpo")
# What only engine torch supports; and of that, what matters with method lora.
TORCH_ONLY = (
    *("parallelism.context_parallel", "parallelism.degrees", "parallelism.expert_parallel", "parallelism.offload"),
    *("parallelism.pipeline_schedule", "parallelism.shard_ranks", "parallelism.virtual_pipeline_parallel"),
    *("training.activation_offload", "training.memory_checkpoint_every_steps", "training.optimizer_state"),
)
LORA_TORCH_ONLY = ("lora.plus_ratio", "lora.quantization", "lora.target_parameters", "model.adapter")


def lacking(config: RunConfig) -> str:
    """What engine torch does not have of a run file, by the objective's name or its key; empty if it has all."""
    if config.training.objective not in TORCH_OBJECTIVES:
        return config.training.objective
    if config.dataset.images:
        return "dataset.images"
    return f"trl.{next(iter(config.trl))}" if config.trl else ""


def with_engine(config: RunConfig) -> RunConfig:
    """The run file with an engine in place of `auto`; whether that engine can train it, its limits say."""
    if config.engine != "auto":
        return config
    found: EngineName = "trl" if lacking(config) else "torch"
    return config.model_copy(update={"engine": found})


def why(config: RunConfig) -> str:
    """Why `auto` takes this engine, in one line; empty where the run file has another, and on Trainium."""
    missing = lacking(config)
    if config.engine == "trl" and missing:
        return f"engine torch has no {missing}"
    fits = config.engine == "torch" and not config.instance.is_neuron
    return "has all that the run needs, and is faster than trl" if fits else ""
