"""Which encoder-decoders can be trained, and what a run file needs for them."""

from collections.abc import Mapping
from typing import Any

from hyperpod_ft.checkpoint.formats.model_directory import is_encoder_decoder
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.errors import UserError

# values of model_type in config.json
FAMILIES = ("t5",)


def check_encoder_decoder(config: RunConfig, model_config: Mapping[str, Any]) -> None:
    """Raise UserError when a run file is for an encoder-decoder and config.json for another model, or the reverse."""
    family = model_config.get("model_type") or "(none)"
    target_length = config.dataset.max_target_length
    if not is_encoder_decoder(model_config):
        if target_length is not None:
            raise UserError(
                f"dataset.max_target_length: only for encoder-decoders, and a {family} model is not one",
                "remove it",
            )
        return
    if family not in FAMILIES:
        raise UserError(
            f"model.source: encoder-decoders of type {family} cannot be trained", f"use one of type {FAMILIES[0]}"
        )
    if target_length is None:
        raise UserError(
            f"dataset.max_target_length: required, since a model of type {family} is an encoder-decoder",
            "set it to the length of the decoder's part of a row, for example 128",
        )
    decoder_start(model_config)


def decoder_start(model_config: Mapping[str, Any]) -> int:
    """The token that the decoder reads first. Raises UserError when config.json names none."""
    start = model_config.get("decoder_start_token_id")
    if not isinstance(start, int):
        raise UserError(
            "model.source: config.json has no decoder_start_token_id", "set it there; T5 begins with its pad token, 0"
        )
    return start
