"""TRL's trainer of a run's objective, with the run's model, adapters and rows."""

import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import datasets
import torch
import trl
from datasets import Dataset
from torch import nn
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainerCallback
from transformers.utils import logging

from hyperpod_ft.checkpoint.formats import pretrained
from hyperpod_ft.checkpoint.formats.model_directory import read_config
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.data import tokenizer
from hyperpod_ft.data.prepared import Prompts
from hyperpod_ft.engines.batches import PackedSplit
from hyperpod_ft.engines.interface import TrainingTask
from hyperpod_ft.engines.peft_config import lora_config
from hyperpod_ft.engines.trl.arguments import arguments
from hyperpod_ft.engines.trl.images import ImageCollator
from hyperpod_ft.engines.trl.prompts import reward_functions, with_prompts
from hyperpod_ft.engines.trl.rows import PairCollator, RowCollator, ScoredPairCollator, UnpairedCollator
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.trl.settings import attention, has_fp32_weights
from hyperpod_ft.processes import usable_cpus


class _MatricesDecay(Trainer):
    """Parameters of one dimension have no weight decay, as with engine torch: TRL would decay DoRA's magnitudes."""

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        return [name for name, parameter in model.named_parameters() if parameter.ndim > 1]


def _kind(name: str) -> tuple[Any, Any]:
    """TRL's trainer, with that decay, and its config class."""
    return type(name, (_MatricesDecay, getattr(trl, f"{name}Trainer")), {}), getattr(trl, f"{name}Config")


_KINDS: Mapping[str, tuple[Any, Any]] = {
    "sft": _kind("SFT"),
    "dpo": _kind("DPO"),
    "kto": _kind("KTO"),
    "reward": _kind("Reward"),
    "grpo": _kind("GRPO"),
    "rloo": _kind("RLOO"),
    "distillation": _kind("Distillation"),
}
_COLLATORS: Mapping[str, type[RowCollator]] = {
    "sft": RowCollator,
    "dpo": PairCollator,
    "kto": UnpairedCollator,
    "reward": ScoredPairCollator,
}
_WORKERS = "dataloader_num_workers"
_MOST_WORKERS = 4
# These prepare the rows that they are made with, and then train on those of their dataset
_PREPARING = ("dpo", "kto", "reward")
_UNUSED = Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}])


def build(
    task: TrainingTask,
    rows: PackedSplit,
    order: Dataset,
    steps: int,
    directory: Path,
    callback: TrainerCallback,
    ends: ExitStack,
) -> tuple[Trainer, RowCollator | None]:
    """The trainer of `rows` in this `order` (rows.py), and what makes its batches; None: TRL does, from prompts.

    It writes to `directory`; when `ends` is closed, its processes end. Raises UserError for what TRL refuses of the run
    file's section `trl`.
    """
    config = task.config
    logging.set_verbosity_error()
    datasets.disable_progress_bars()
    model = _model(config, task.base_model)
    adapters = lora_config(config, read_config(task.base_model)) if config.training.method == "lora" else None
    kind, settings = _KINDS[config.training.objective]
    processing: Any = tokenizer.load(task.base_model)
    if config.training.objective == "reward":  # transformers finds a text's last token by it
        processing.pad_token = processing.convert_ids_to_tokens(model.config.pad_token_id)
    collator: RowCollator | None = None
    further: dict[str, Any]
    if config.training.samples_answers:
        prompts = Prompts(task.dataset / "train")
        order = with_prompts(order, prompts, processing)
        if task.teacher:
            further = {"teacher_model": pretrained.load(task.teacher, _computed_in(config), attention(config))}
        else:
            further = {"reward_funcs": reward_functions(task, prompts, processing, ends)}
    elif config.dataset.images:
        collator = ImageCollator(rows, task.base_model)
        further = {"data_collator": collator}
    else:
        # flash attention finds the documents of a batch only where they are one row (transformers)
        collator = _COLLATORS[config.training.objective](
            rows, flat="flash" in attention(config), pad=tokenizer.pad_id(processing)
        )
        further = {"data_collator": collator}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = kind(
                model=model,
                args=settings(**image_workers(task), **arguments(config, task.layout.sharding, steps, directory)),
                train_dataset=_UNUSED if config.training.objective in _PREPARING else order,
                processing_class=processing,
                peft_config=adapters,
                callbacks=[callback],
                **further,
            )
    except (TypeError, ValueError, ImportError) as error:
        if not config.trl:
            raise
        raise UserError(f"trl: TRL refuses the settings: {' '.join(str(error).split())}", "correct them") from error
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:  # PEFT leaves modules that are trained whole in bf16
            parameter.data = parameter.data.float()
    if task.teacher:  # which accelerate leaves where it is if it shards the model
        trainer.teacher_model.to(trainer.args.device)
    if config.dataset.images:
        # the forward pass of these types takes no count of a step's tokens, but TRL's loss does
        trainer.model_accepts_loss_kwargs = True
    trainer.train_dataset = order
    trainer.remove_callback(PrinterCallback)  # the kit prints the steps
    return trainer, collator


def image_workers(task: TrainingTask) -> dict[str, int]:
    """How many processes read images for a rank: else its GPU would wait for a CPU before each step."""
    config = task.config
    if not (config.dataset.images and config.instance.has_accelerators) or _WORKERS in config.trl:
        return {}
    # the threads of the rank itself have CPUs too
    return {_WORKERS: max(0, min(_MOST_WORKERS, usable_cpus() // task.layout.degrees.ranks_per_node - 1))}


def _model(config: RunConfig, directory: Path) -> PreTrainedModel:
    """The model on the CPU. Trained weights are fp32, and computed with in bf16 by autocast, as others may be."""
    dtype = torch.float32 if has_fp32_weights(config) else _computed_in(config)
    return pretrained.load(directory, dtype, attention(config))


def _computed_in(config: RunConfig) -> torch.dtype:
    """That of a frozen model's weights."""
    return torch.bfloat16 if config.training.precision == "bf16" else torch.float32
