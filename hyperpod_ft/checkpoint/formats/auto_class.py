"""The class of transformers that builds the model of a directory."""

from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM


def auto_class(*, is_encoder_decoder: bool) -> Any:
    """The auto class for causal language models or for encoder-decoders.

    `Any`, since its annotations leave out what `from_pretrained` returns with `output_loading_info`.
    """
    return AutoModelForSeq2SeqLM if is_encoder_decoder else AutoModelForCausalLM
