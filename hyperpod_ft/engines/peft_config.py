"""The section `lora` of a run file as PEFT's configuration, for the engines whose trainers use PEFT."""

from collections.abc import Mapping
from typing import Any

from peft import LoraConfig

from hyperpod_ft.checkpoint.adapters.lora_config import in_language_model
from hyperpod_ft.checkpoint.formats.model_directory import is_image_text, of_language_model
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.planning.lora import targets


def lora_config(config: RunConfig, model_config: Mapping[str, Any]) -> LoraConfig:
    """`model_config`: config.json. Targets are named as in the model's files."""
    lora = config.lora
    wanted = targets(lora, str(of_language_model(model_config).get("model_type", "")))
    return LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,  # type: ignore[arg-type] # PEFT only divides it
        lora_dropout=lora.dropout,
        target_modules=in_language_model(wanted) if is_image_text(model_config) else list(wanted),
        modules_to_save=list(lora.modules_to_save) or None,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=config.model.source,
        revision=config.model.revision,
    )
