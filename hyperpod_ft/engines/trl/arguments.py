"""The run file as arguments of TRL's trainers. Pure; TRL's config classes check the values."""

from pathlib import Path
from typing import Any

from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.planning.layout import Sharding


def arguments(config: RunConfig, sharding: Sharding, steps: int, directory: Path) -> dict[str, Any]:
    """The keyword arguments of TRL 1.16's config class of the run's objective.

    `sharding`: replicated, or zero2 or zero3 over all ranks; `steps`: the number of optimizer steps of the training;
    `directory`: where the trainer writes checkpoints.
    """
    training, on_cpu = config.training, not config.instance.has_accelerators
    return {
        "output_dir": str(directory),
        "max_steps": steps,
        "per_device_train_batch_size": training.micro_batch_size,
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
        "learning_rate": training.learning_rate,
        # the kit sets the learning rate of every step
        "lr_scheduler_type": "constant",
        "weight_decay": training.weight_decay,
        "adam_beta1": training.adam_beta1,
        "adam_beta2": training.adam_beta2,
        "max_grad_norm": training.max_grad_norm,
        "bf16": training.precision == "bf16",
        **_placed(sharding, recompute=training.activation_checkpointing == "full"),
        "seed": config.seed,
        "use_cpu": on_cpu,
        # one step after another in the order of the training dataset, which is the kit's
        "train_sampling_strategy": "sequential",
        "remove_unused_columns": False,
        "dataloader_pin_memory": not on_cpu,
        # every step is reported; the callback decides about the rest
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        # every trained parameter is used in every forward pass, but for a tower without images; no buffer changes
        "ddp_find_unused_parameters": config.lora.image_tower,
        "ddp_broadcast_buffers": False,
        **_of_objective(config),
        **config.trl,
    }


def _placed(sharding: Sharding, *, recompute: bool) -> dict[str, Any]:
    """DDP's replicas, or FSDP2, which recomputes layers itself. `recompute`: each layer in the backward pass."""
    if not sharding.by_layer:
        return {"gradient_checkpointing": recompute, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    settings = {
        "version": 2,
        "reshard_after_forward": sharding.mode == "zero3",
        "state_dict_type": "SHARDED_STATE_DICT",
        "activation_checkpointing": recompute,
    }
    return {"gradient_checkpointing": False, "fsdp": True, "fsdp_config": settings}


def _of_objective(config: RunConfig) -> dict[str, Any]:
    objective, sampling = config.training.objective, config.sampling
    found: dict[str, Any] = {}
    if objective not in ("reward", "distillation"):
        # TRL would add the loss that balances experts, which the limits refuse where config.json asks for it
        found["router_aux_loss_coef"] = 0.0
    if config.training.samples_answers:
        found |= {
            "max_completion_length": sampling.max_completion_length,
            "temperature": sampling.temperature,
            "shuffle_dataset": False,  # likewise
            "vllm_max_model_length": config.dataset.max_length + sampling.max_completion_length,
        }
        if config.teacher:
            return found | {"beta": config.teacher.beta}
        weights = [reward.weight for reward in config.reward]
        return found | {"num_generations": sampling.generations, "beta": sampling.beta, "reward_weights": weights}
    found |= {"max_length": None, "label_names": ["labels"]}  # the rows have their length
    if objective == "sft":  # and are already tokenized, packed and labeled
        return found | {"dataset_kwargs": {"skip_prepare_dataset": True}}
    found["disable_dropout"] = not config.lora.dropout
    if objective == "dpo":
        found["beta"] = config.dpo.beta
    if objective == "kto":
        found |= config.kto.model_dump()  # its keys have TRL's names
    return found
