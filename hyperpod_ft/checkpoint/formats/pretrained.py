"""Load a model directory with transformers, completely or not at all. Like located.py, it imports torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from transformers.utils import logging

from hyperpod_ft.checkpoint.formats.model_directory import is_classifier, is_encoder_decoder, is_image_text, read_config
from hyperpod_ft.errors import UserError

_REMEDY = "make or download the model again"


def auto_class(config: Mapping[str, Any]) -> Any:
    """The auto class for causal language models, encoder-decoders, reward or image-text models, by config.json.

    `Any`, since its annotations leave out what `from_pretrained` returns with `output_loading_info`.
    """
    if is_classifier(config):
        return AutoModelForSequenceClassification
    if is_encoder_decoder(config):
        return AutoModelForSeq2SeqLM
    return AutoModelForImageTextToText if is_image_text(config) else AutoModelForCausalLM


def load(directory: Path, dtype: torch.dtype | str, attention: str | None = None) -> PreTrainedModel:
    """The model in `directory`, whole, on the CPU.

    `dtype` "auto" is that of config.json. `attention` is transformers' name of an implementation; None: SDPA if the
    family has it, otherwise its own. Neither the model's own code nor a pickle is run. Raises UserError when a file is
    damaged, or a weight is missing, for which transformers would draw random numbers.
    """
    # it warns, on every rank, that a directory named model@revision is not a Python module; 5.x draws a progress bar
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    loader = auto_class(read_config(directory))
    try:
        loaded = loader.from_pretrained(
            directory,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            attn_implementation=attention,
            dtype=dtype,
        )
    except Exception as error:  # a damaged file raises errors of any type
        raise UserError(f"{directory}: cannot load the model: {type(error).__name__}: {error}", _REMEDY) from error
    model: PreTrainedModel
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise UserError(f"{directory}: {len(missing)} of the model's tensors are missing: {missing[0]}", _REMEDY)
    if getattr(model.config, "output_router_logits", False):
        # transformers computes the loss of routers then, which fails where a padded batch is continued
        model.config.output_router_logits = False
    return model
