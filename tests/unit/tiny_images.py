"""Tiny random models that read images, as they are on the Hub: weights, tokenizer, chat template, processor."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast

from benchmarks.conversations import templates
from tests.unit import tiny_tokenizer
from tests.unit.tiny_families import SIZES

_QWEN = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
_GEMMA = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
_TURNS = {"gemma3": ("<start_of_turn>", "<end_of_turn>"), "qwen3_vl": (tiny_tokenizer.START, tiny_tokenizer.END)}
_NORMAL = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_PROCESSOR: dict[str, dict[str, Any]] = {
    "gemma3": {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 32, "width": 32}} | _NORMAL,
    "qwen3_vl": {"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 8, "temporal_patch_size": 1}
    | {"merge_size": 2, "size": {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}}
    | _NORMAL,
}
TYPES = tuple(_PROCESSOR)


def save(directory: Path, model_type: str, hidden: int = 32) -> None:
    """The model's directory."""
    own = tiny_tokenizer.make(adds_bos=False)
    end = _TURNS[model_type][1]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=own.backend_tokenizer,
        bos_token=tiny_tokenizer.BOS,
        eos_token=end,
        pad_token=tiny_tokenizer.EOS,
        additional_special_tokens=list(
            dict.fromkeys((*_TURNS[model_type], *(_QWEN if model_type == "qwen3_vl" else ())))
        ),
        chat_template=templates()[model_type],
        **({"extra_special_tokens": _GEMMA} if model_type == "gemma3" else {}),
    )
    tokenizer.save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(_PROCESSOR[model_type]))
    about = {"image_seq_length": 16} if model_type == "gemma3" else {}
    (directory / "processor_config.json").write_text(json.dumps(about))
    torch.manual_seed(7)
    model = AutoModelForImageTextToText.from_config(_config(model_type, tokenizer, hidden))
    if model_type == "qwen3_vl":
        # adapters of a random model learn little under an output layer whose logits are all small
        model.get_output_embeddings().weight.data *= 8
    model.save_pretrained(directory)


def _config(model_type: str, tokenizer: PreTrainedTokenizerFast, hidden: int) -> Any:
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in (*_QWEN, *_GEMMA.values())}
    language = SIZES | {"vocab_size": len(tokenizer), "hidden_size": hidden, "max_position_embeddings": 256}
    language |= {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id}
    tower: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "patch_size": 8}
    if model_type == "gemma3":
        language |= {"query_pre_attn_scalar": 8, "sliding_window": 64}
        language |= {"layer_types": ["sliding_attention", "full_attention"]}
        tower |= {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32}
        tokens = {"image_token_id": ids["<image_soft_token>"], "boi_token_index": ids["<start_of_image>"]}
        tokens |= {"eoi_token_index": ids["<end_of_image>"], "mm_tokens_per_image": 16}
        return AutoConfig.for_model(model_type, text_config=language, vision_config=tower, **tokens)
    language |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
    tower |= {"depth": 2, "num_heads": 2, "temporal_patch_size": 1, "spatial_merge_size": 2}
    tower |= {"out_hidden_size": hidden, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    tokens = {"image_token_id": ids["<|image_pad|>"], "video_token_id": ids["<|video_pad|>"]}
    tokens |= {"vision_start_token_id": ids["<|vision_start|>"], "vision_end_token_id": ids["<|vision_end|>"]}
    return AutoConfig.for_model(
        model_type, text_config=language, vision_config=tower, tie_word_embeddings=False, **tokens
    )


def picture(color: str = "red", size: tuple[int, int] = (40, 32), form: str = "PNG") -> bytes:
    """A square on white."""
    image = Image.new("RGB", size, "white")
    ImageDraw.Draw(image).rectangle((8, 8, size[0] - 8, size[1] - 8), fill=color)
    stream = io.BytesIO()
    image.save(stream, form)
    return stream.getvalue()


def data_url(file: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"
