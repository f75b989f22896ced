"""The section `lora` of a run file as PEFT's configuration, for the engines whose trainers use PEFT."""

from collections.abc import Mapping
from typing import Any

from peft import LoraConfig

from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.planning.lora import target_modules


def lora_config(config: RunConfig, model_config: Mapping[str, Any]) -> LoraConfig:
    """`model_config`: config.json. Targets are named as in the model's files."""
    lora, scores = config.lora, config.training.objective == "reward"
    modules = target_modules(lora, model_config)
    return LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,  # type: ignore[arg-type] # PEFT only divides it
        lora_dropout=lora.dropout,
        target_modules=modules if isinstance(modules, str) else list(modules),
        modules_to_save=[*lora.modules_to_save, *(["score"] if scores else ())] or None,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        bias="none",
        task_type="SEQ_CLS" if scores else "CAUSAL_LM",
        base_model_name_or_path=config.model.source,
        revision=config.model.revision,
    )
