"""Image-text models: engine torch trains the language model in one, and its tensors have the names of the whole's.

The tower that reads images stays as it is in the base model's files.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
    initialization,
)

from hyperpod_ft.checkpoint.formats import model_directory
from hyperpod_ft.checkpoint.formats.model_directory import read_config
from hyperpod_ft.checkpoint.formats.safetensors_file import has_weights, read_model
from hyperpod_ft.errors import UserError


@dataclass(frozen=True)
class LanguageModel:
    """Where in an image-text model its language model is, by the names of modules."""

    whole: PreTrainedModel  # on the meta device
    config: PreTrainedConfig  # of the language model
    stack: str  # the decoder, without its output layer
    head: str  # the output layer
    prefix: str  # the decoder's name in a language model alone

    def name_in_whole(self, name: str) -> str:
        """The name in the whole model of a module or parameter of the language model alone."""
        if name.startswith(f"{self.prefix}."):
            return self.stack + name.removeprefix(self.prefix)
        return name.replace("lm_head", self.head, 1)


def language_model(directory: Path) -> LanguageModel | None:
    """The language model in the image-text model of `directory`; None when it is a language model itself.

    Raises UserError for one that transformers cannot build alone.
    """
    described = read_config(directory)
    if not model_directory.is_image_text(described):
        return None
    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    text = config.text_config
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise _unknown(described)
    with torch.device("meta"), initialization.meta_device_safe_creation_ops():
        whole: PreTrainedModel = AutoModelForImageTextToText.from_config(config, trust_remote_code=False)
        alone: PreTrainedModel = AutoModelForCausalLM.from_config(text, trust_remote_code=False)
    decoder = type(alone.base_model)
    stack = next((name for name, module in whole.named_modules() if type(module) is decoder), "")
    output = whole.get_output_embeddings()
    head = next((name for name, module in whole.named_modules() if module is output), "")
    found = LanguageModel(whole, text, stack, head, alone.base_model_prefix)
    names = whole.state_dict().keys()
    if not (stack and head) or any(found.name_in_whole(name) not in names for name in alone.state_dict()):
        raise _unknown(described)
    files = [tensor.name for tensor in read_model(directory)] if has_weights(directory) else []
    # classes tie by default, also of types whose published models do not
    text.tie_word_embeddings = model_directory.is_tied(described, files) if files else text.tie_word_embeddings
    return found


def names_in_whole(directory: Path, names: Iterable[str]) -> dict[str, str]:
    """The names in the whole model of what a language model alone calls `names`; nothing for a language model."""
    found = language_model(directory)
    return {name: found.name_in_whole(name) for name in names} if found else {}


def _unknown(config: dict[str, object]) -> UserError:
    return UserError(
        f"model.source: transformers has no language model alone for the text of {config.get('model_type')} models",
        "choose another model",
    )
