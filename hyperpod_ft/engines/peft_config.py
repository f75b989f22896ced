"""The section `lora` of a run file as PEFT's configuration, for the engines whose trainers use PEFT."""

from peft import LoraConfig

from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.planning.lora import targets


def lora_config(config: RunConfig, family: str) -> LoraConfig:
    """`family`: config.json's model_type. Targets are named as in the model's files."""
    lora, scores = config.lora, config.training.objective == "reward"
    return LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,  # type: ignore[arg-type] # PEFT only divides it
        lora_dropout=lora.dropout,
        target_modules=list(targets(lora, family)),
        modules_to_save=[*lora.modules_to_save, *(["score"] if scores else ())] or None,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        bias="none",
        task_type="SEQ_CLS" if scores else "CAUSAL_LM",
        base_model_name_or_path=config.model.source,
        revision=config.model.revision,
    )
