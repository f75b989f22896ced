"""The run file as arguments of optimum-neuron's trainer. Pure; `NeuronSFTConfig` checks the names."""

from typing import Any

from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.engines.interface import TrainingTask
from hyperpod_ft.planning.neuron.limits import uses_flash_attention

_NO_BOUND = 1e30


def arguments(task: TrainingTask, steps: int) -> dict[str, Any]:
    """The keyword arguments of `NeuronSFTConfig` (optimum-neuron 0.4.5, trainers/training_args.py and sft_config.py).

    `steps`: the number of optimizer steps of the training.
    """
    config, degrees = task.config, task.layout.degrees
    training, neuron = config.training, config.neuron
    return {
        "output_dir": str(task.directory),
        "do_train": True,
        "max_steps": steps,
        "per_device_train_batch_size": training.micro_batch_size,
        # a pipeline requires this to be divisible by its micro batches, although nothing is evaluated
        "per_device_eval_batch_size": training.micro_batch_size,
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
        "learning_rate": training.learning_rate,
        # the kit sets the learning rate of every step
        "lr_scheduler_type": "constant",
        "weight_decay": training.weight_decay,
        "adam_beta1": training.adam_beta1,
        "adam_beta2": training.adam_beta2,
        # without a bound the trainer would not report the norm
        "max_grad_norm": training.max_grad_norm or _NO_BOUND,
        "bf16": training.precision == "bf16",
        "gradient_checkpointing": training.activation_checkpointing == "full",
        # NeuronSFTTrainer reads this with LoRA; with True it would enable gradients of the inputs a second time, after
        # PEFT. Recomputation is torch_xla's, which is always reentrant.
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "tensor_parallel_size": degrees.tensor_parallel,
        "pipeline_parallel_size": degrees.pipeline_parallel,
        "disable_sequence_parallel": not neuron.sequence_parallel,
        "zero_1": neuron.zero_1,
        "stochastic_rounding_enabled": neuron.stochastic_rounding,
        "optimizer_use_master_weights": neuron.master_weights,
        "optimizer_use_fp32_grad_acc": neuron.master_weights,
        "fuse_qkv": neuron.fuse_qkv,
        "use_xser": neuron.xser,
        "async_save": training.async_save,
        "max_length": config.dataset.max_length,
        "packing": False,
        # the rows are already tokenized, packed to full length, and labeled
        "dataset_kwargs": {"skip_prepare_dataset": True},
        "label_names": ["labels"],
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "skip_cache_push": True,
    }


def attention(config: RunConfig) -> str:
    """The attention implementation, by transformers' name for it."""
    return "flash_attention_2" if uses_flash_attention(config) else "eager"
