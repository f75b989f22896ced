"""The files of a Hugging Face model other than its weights: configuration, tokenizer, chat template, license.

Its configuration also says whether the embedding and the output layer are one parameter under two names. With
transformers' `tie_word_embeddings` the files usually have the embedding only.
"""

import re
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hyperpod_ft import publish
from hyperpod_ft.checkpoint.formats.json_file import read_object
from hyperpod_ft.checkpoint.tensors.logical_tensor import LogicalTensor
from hyperpod_ft.errors import UserError

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZER = (
    "tokenizer*.json",
    "tokenizer.model*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.tiktoken",
    "tekken.json",
    "spiece.model",
    "sentencepiece*.model",
    "chat_template.*",
    "additional_chat_templates/*.jinja",
)
# Configuration, tokenizer, chat template, processor of images, license. Not code (`*.py`): the kit never runs a
# model's own.
BESIDE_WEIGHTS = (
    "config.json",
    GENERATION_CONFIG,
    *TOKENIZER,
    "*processor_config.json",
    "LICENSE*",
    "LICENCE*",
    "NOTICE*",
    "USE_POLICY*",
)
OUTPUT = "lm_head.weight"
SCORE = "score.weight"  # of reward models, in its place
CLASSIFIER = "ForSequenceClassification"  # ends the names of transformers' classes of these
# How many times as large weights become at most when quantized.py decodes them: bfloat16 has 16 bits for 8, or for 4
# and their scales. Tensors that are not quantized stay as they are.
_GROWTH = {"mxfp4": 4, "fp8": 2, "bitsandbytes": 4}
# Types of transformers whose linear layers are Conv1D, which stores them as (in, out).
CONV1D = frozenset({"gpt2", "openai-gpt", "imagegpt", "decision_transformer"})
# T5's embedding. Its encoder and decoder use it too; files may hold it again under their names.
SHARED, SHARED_ALIASES = "shared.weight", ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
_PREDICTOR, _LAYER = re.compile(r"(?:^|\.)mtp(?:_layers)?\."), re.compile(r"(?:(?:language_)?model\.)*layers\.(\d+)\.")
# Names of the embedding in transformers' other language models: Llama and most others, GPT-2, GPT-NeoX, BLOOM.
EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings")


def copy_files(base: Path, target: Path, patterns: Iterable[str] = BESIDE_WEIGHTS) -> list[str]:
    """Copy all files but the weights; contents, not links, with modes that follow the umask. Returns the names.

    Raises UserError when one is a broken link, as in a cache that was cleaned up.
    """
    found = {file for pattern in patterns for file in base.glob(pattern) if file.is_file() or file.is_symlink()}
    if lost := sorted(file for file in found if not file.is_file()):
        raise UserError(f"{lost[0]}: is a broken link", "download the model again")
    names = sorted(file.relative_to(base).as_posix() for file in found)
    for name in names:
        (target / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(base / name, target / name)
    return names


def read_config(directory: Path, remedy: str = "download the model again") -> dict[str, Any]:
    """config.json. Raises UserError, with `remedy`, when it is missing or is not a JSON object."""
    return read_object(directory / CONFIG, remedy)


def quantization(config: Mapping[str, Any]) -> str:
    """How the weights are quantized, by config.json; empty when they are not."""
    described = config.get("quantization_config")
    return str(described.get("quant_method", "unknown")) if isinstance(described, Mapping) else ""


def decoded_bytes(config: Mapping[str, Any], nbytes: int) -> int:
    """What weights of `nbytes` take at most when they are decoded; 0 for those that stay as they are."""
    return _GROWTH.get(quantization(config), 0) * nbytes


def refuse_undecodable(config: Mapping[str, Any]) -> None:
    """Raise UserError when the weights are quantized in a way that quantized.py does not know."""
    described = config.get("quantization_config") or {}
    found = quantization(config)
    in_8_bits = found == "bitsandbytes" and not described.get("load_in_4bit", described.get("_load_in_4bit"))
    if found and (found not in _GROWTH or in_8_bits):
        raise UserError(
            f"model.source: the weights are quantized ({found}{' in 8 bits' * in_8_bits}) and cannot be decoded",
            "use the model in bf16, fp16 or fp32, or one in mxfp4, fp8 or bitsandbytes' 4 bits",
        )


def is_image_text(config: Mapping[str, Any]) -> bool:
    """Whether config.json is that of a model that reads images too, around a language model."""
    return isinstance(config.get("text_config"), Mapping)


def of_language_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a config.json says of the language model: all of it, or for an image-text model its `text_config`."""
    inner: Mapping[str, Any] = config["text_config"] if is_image_text(config) else config
    return inner


def is_encoder_decoder(config: Mapping[str, Any]) -> bool:
    """Whether config.json is that of a model with encoder and decoder; transformers omits what its class has."""
    return bool(config.get("is_encoder_decoder", config.get("model_type") == "t5"))


def is_classifier(config: Mapping[str, Any]) -> bool:
    """Whether config.json is that of a model that scores texts, such as a reward model."""
    return str((config.get("architectures") or [""])[0]).endswith(CLASSIFIER)


def decoder_start(config: Mapping[str, Any]) -> int:
    """The token that the decoder reads first. Raises UserError when config.json names none."""
    start = config.get("decoder_start_token_id")
    if not isinstance(start, int):
        raise UserError(
            "model.source: config.json has no decoder_start_token_id", "set it there; T5 begins with its pad token, 0"
        )
    return start


def chat_template(directory: Path) -> str | None:
    """The template in chat_template.jinja; None without that file."""
    file = directory / CHAT_TEMPLATE
    return file.read_text(encoding="utf-8") if file.is_file() else None


def chat_templates(directory: Path) -> list[str]:
    """The chat templates of a tokenizer's directory, as text: those in files of their own, or else in its settings.

    Raises UserError for a damaged file.
    """
    files = [directory / CHAT_TEMPLATE, *sorted(directory.glob("additional_chat_templates/*.jinja"))]
    if found := [file.read_text(encoding="utf-8") for file in files if file.is_file()]:
        return found
    for settings in (directory / "chat_template.json", directory / TOKENIZER_CONFIG):
        if settings.is_file():
            given = read_object(settings, "download the model again").get("chat_template")
            listed = given if isinstance(given, list) else [given]  # several, by name
            found += [str(one.get("template") if isinstance(one, dict) else one) for one in listed if one is not None]
    return found


def has_chat_template(directory: Path) -> bool:
    """Whether there is one. Raises UserError for a damaged file."""
    return bool(chat_templates(directory))


def set_chat_template(directory: Path, text: str) -> None:
    """Make it the model's one chat template: no other may be left for a program that looks elsewhere first."""
    for file in (*directory.glob("chat_template.*"), *directory.glob("additional_chat_templates/*")):
        file.unlink()
    settings = directory / TOKENIZER_CONFIG
    if settings.is_file():
        values = read_object(settings, "download the model again")
        if values.pop("chat_template", None) is not None:
            publish.write_json(settings, values)
    publish.write_text(directory / CHAT_TEMPLATE, text)


def stop_ids(directory: Path) -> list[int]:
    """The ids that end an answer: `eos_token_id` of generation_config.json, or else of config.json."""
    for name in (GENERATION_CONFIG, CONFIG):
        path = directory / name
        found = read_object(path, "download the model again").get("eos_token_id") if path.is_file() else None
        if found is not None:
            return list(found) if isinstance(found, list) else [found]
    return []


def add_stop_ids(directory: Path, ids: Sequence[int]) -> None:
    """Name in generation_config.json what training ends answers with, beside what ends them already."""
    if missing := sorted(set(ids).difference(known := stop_ids(directory))):
        path = directory / GENERATION_CONFIG
        values = read_object(path, "download the model again") if path.is_file() else {}
        publish.write_json(path, values | {"eos_token_id": [*known, *missing]})


def set_dtype(directory: Path, torch_name: str) -> None:
    """Set the dtype of the weights in config.json, under the key that it already uses.

    transformers before 4.56 wrote `torch_dtype`, later ones `dtype`; both are read.
    """
    values = read_config(directory)
    keys = [key for key in ("dtype", "torch_dtype") if key in values] or ["torch_dtype"]
    update_config(directory, dict.fromkeys(keys, torch_name))


def update_config(directory: Path, values: Mapping[str, Any]) -> None:
    """Set values in config.json as `updated` does."""
    publish.write_json(directory / CONFIG, updated(read_config(directory), values))


def updated(config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with these values; of an image-text model, those of its language model."""
    if not is_image_text(config):
        return {**config, **values}
    outer = {key: value for key, value in values.items() if key in config or key == "tie_word_embeddings"}
    return {**config, "text_config": {**config["text_config"], **values}, **outer}


def embedding(names: Collection[str]) -> str | None:
    """The name of the embedding among a model's tensors; None unless there is exactly one."""
    if SHARED in names:
        return SHARED
    found = [name for name in names if name.endswith(tuple(f"{module}.weight" for module in EMBEDDINGS))]
    return found[0] if len(found) == 1 else None


def is_tied(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """`config`: config.json, where a missing key means the default of the architecture."""
    stated = config.get("tie_word_embeddings")
    if is_image_text(config):
        return not any(name.endswith(OUTPUT) for name in names)
    if config.get("model_type") == "t5":
        # transformers 5 always writes true, and here what the original key said: v1.0 scales, and ties
        return OUTPUT not in names or bool(config.get("scale_decoder_outputs", stated is not False))
    return bool(stated) if stated is not None else OUTPUT not in names and embedding(names) is not None


def language_names(config: Mapping[str, Any], names: Collection[str]) -> list[str]:
    """The names of the language model's tensors: all, but for an image-text model."""
    first = embedding(names)
    if not is_image_text(config) or first is None:
        return list(names)
    decoder = first.removesuffix(".weight").rpartition(".")[0]
    return [name for name in names if name.startswith(f"{decoder}.") or name.endswith(OUTPUT)]


def without_predictors(config: Mapping[str, Any], tensors: Mapping[str, LogicalTensor]) -> dict[str, LogicalTensor]:
    """The tensors but for layers that predict several tokens ahead, which transformers' classes do not have.

    They are called `mtp` (Qwen3-Next), or follow the last layer (DeepSeek-V3, GLM-4.5). `config`: config.json.
    """
    layers = of_language_model(config).get("num_hidden_layers")

    def predicts(name: str) -> bool:
        layer = layer_of(name)
        after_the_last = layer is not None and isinstance(layers, int) and layer >= layers
        return after_the_last or _PREDICTOR.search(name) is not None

    return {name: tensor for name, tensor in tensors.items() if not predicts(name)}


def layer_of(name: str) -> int | None:
    """The number of the layer of a decoder that a tensor is in; None for others, and where layers have other names."""
    found = _LAYER.match(name)
    return int(found[1]) if found else None


def with_tied_output(tensors: Mapping[str, LogicalTensor]) -> dict[str, LogicalTensor]:
    """A tied model's tensors under all their names: the output layer is the embedding."""
    name = embedding(tensors)
    return {**tensors, OUTPUT: tensors[name].renamed(OUTPUT)} if name else dict(tensors)
