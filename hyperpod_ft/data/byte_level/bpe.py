"""A model's tokenizer read directly from its files, if they describe byte-level BPE and nothing else.

transformers and the `tokenizers` library take seconds and hundreds of megabytes to load a tokenizer of 128k tokens.
This module reads the parts that determine the ids; if a file has others, `read` leaves the model to transformers.
"""

import json
import mmap
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from hyperpod_ft.data.byte_level.merge_order import merges_follow_ranks

# How text is split before the merges. Regex engines agree on these patterns; a test compares those of `tokenizers` and
# tiktoken over all of Unicode.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
# of the quickstart's tiny Llama
_TINY = r" ?[\p{L}_-]+=?| ?[\p{N}:]+| ?[^\s\p{L}\p{N}_]+|\s+(?!\S)|\s+"
PATTERNS = (_GPT2, _LLAMA3, _TINY)

# Keys of tokenizer_config.json that change no ids, or are checked below; with any other, transformers is used.
_SPECIAL = {f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}
_KNOWN_KEYS = _SPECIAL | {
    "added_tokens_decoder",
    "additional_special_tokens",
    "backend",
    "chat_template",
    "clean_up_tokenization_spaces",
    "extra_special_tokens",
    "is_local",
    "local_files_only",
    "model_input_names",
    "model_max_length",
    "padding_side",
    "tokenizer_class",
    "truncation_side",
}
# Classes that read tokenizer.json as it is: that of transformers 4, and its name since 5.
_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
# For these values of model_type in config.json, transformers 5 takes only the vocabulary from the files, also where
# tokenizer_config.json names one of those classes (tokenization_auto.py, MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS).
REBUILT = frozenset(
    ("hyperclovax_vision_v2", "qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp", "siglip2")
)
# Without added_tokens_decoder, transformers reads special tokens from these, too.
_OLDER_FILES = ("special_tokens_map.json", "added_tokens.json")
_ADDED_KEYS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
_MERGES = re.compile(rb'"merges":\s*\[')
# Between two merges. A quotation mark inside a token is escaped with a backslash.
_BETWEEN_PAIRS = re.compile(rb'(?<!\\)"\s*\](,)\s*\[\s*"')
_BETWEEN_TEXTS = re.compile(rb'(?<!\\)"(,)\s*"')
_BLOCK_BYTES = 1 << 19


@dataclass(frozen=True)
class ByteLevelBpe:
    """`ranks`: a token's bytes to its id; lower ids are merged first. `added`: tokens matched verbatim before that."""

    ranks: dict[bytes, int]
    added: dict[str, int]
    pattern: str
    bos: int | None
    eos: int | None
    pad: int | None
    opening: tuple[int, ...]  # the first special token that it adds to a text


def read(model: Path) -> ByteLevelBpe | None:
    """The tokenizer of a model directory; None if it is of another kind, or its files are missing or damaged."""
    try:
        config = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
        _require("added_tokens_decoder" in config or not any((model / name).exists() for name in _OLDER_FILES))
        _require(json.loads((model / "config.json").read_text(encoding="utf-8")).get("model_type") not in REBUILT)
        with (
            (model / "tokenizer.json").open("rb") as stream,
            mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            return _described(config, content)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def _described(config: dict[str, Any], content: mmap.mmap) -> ByteLevelBpe:
    merges = _MERGES.search(content)
    _require(merges is not None)
    assert merges is not None
    end = content.rfind(b"]")
    # the merges are the larger part of the file: they are parsed block by block, apart from the rest
    file = json.loads(content[: merges.end()] + content[end:])
    _require(file["normalizer"] is None and file["truncation"] is None and file["padding"] is None)
    added = _added(file["added_tokens"])
    named = _named(config, file["added_tokens"])
    model = file["model"]
    _require(model["type"] == "BPE" and not model.get("dropout"))
    _require(not any(model.get(key) for key in ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")))
    # added tokens are matched before the merges
    vocabulary = {token: number for token, number in model["vocab"].items() if token not in added}
    ids = [*vocabulary.values(), *added.values()]
    _require(len(set(ids)) == len(ids) and _BYTES.keys() <= vocabulary.keys())
    blocks = _blocks(content, merges.end(), end)
    _require(merges_follow_ranks(vocabulary, blocks, whole_words=bool(model.get("ignore_merges"))))
    return ByteLevelBpe(
        ranks={token.translate(_TO_LATIN_1).encode("latin-1"): number for token, number in vocabulary.items()},
        added=added,
        pattern=_pattern(file["pre_tokenizer"]),
        bos=named.get("bos_token"),
        eos=named.get("eos_token"),
        pad=named.get("pad_token"),
        opening=_opening(file["post_processor"]),
    )


def _require(fits: bool) -> None:
    if not fits:
        raise ValueError("the files have settings that ByteLevelBpe cannot express")


def _alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte, as in `bytes_to_unicode` of its encoder.py."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _alphabet()
_TO_LATIN_1 = str.maketrans({character: chr(byte) for character, byte in _BYTES.items()})


def _added(tokens: list[dict[str, Any]]) -> dict[str, int]:
    contents = sorted(token["content"] for token in tokens)
    # If one is a prefix of another, engines may differ in which one they match.
    _require(all(contents) and not any(b.startswith(a) for a, b in pairwise(contents)))
    _require(not any(token[key] for token in tokens for key in ("single_word", "lstrip", "rstrip", "normalized")))
    return {token["content"]: token["id"] for token in tokens}


def _named(config: dict[str, Any], added: list[dict[str, Any]]) -> dict[str, int]:
    """Ids of the special tokens by their name in tokenizer_config.json.

    transformers also matches those that tokenizer.json lacks or describes differently: there must be none.
    """
    _require(config["tokenizer_class"] in _CLASSES and config.keys() <= _KNOWN_KEYS)
    here = {str(token["id"]): {key: token[key] for key in _ADDED_KEYS} for token in added}
    again = config.get("added_tokens_decoder", {})
    _require(again == {number: here[number] for number in again})
    ids = {token["content"]: int(token["id"]) for token in added}
    specials = {name: _content(config[name]) for name in _SPECIAL & config.keys() if config[name] is not None}
    # a list since transformers 5, which renamed it; before, a mapping from names
    extra = config.get("extra_special_tokens") or []
    _require(isinstance(extra, list))
    _require(all(_content(token) in ids for token in [*extra, *(config.get("additional_special_tokens") or ())]))
    return {name: ids[content] for name, content in specials.items()}


def _content(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _pattern(pre_tokenizer: dict[str, Any]) -> str:
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    last = steps[-1]
    _require(last["type"] == "ByteLevel" and not last["add_prefix_space"])
    if last.get("use_regex", True):
        _require(len(steps) == 1)
        return _GPT2
    _require(len(steps) == 2 and steps[0]["type"] == "Split")
    split = steps[0]
    _require(split["behavior"] == "Isolated" and not split["invert"] and split["pattern"].get("Regex") in PATTERNS)
    return str(split["pattern"]["Regex"])


def _opening(post_processor: dict[str, Any] | None) -> tuple[int, ...]:
    steps = (post_processor or {"processors": []}).get("processors", [post_processor])
    templates = [step for step in steps if step["type"] == "TemplateProcessing"]
    _require(len(templates) <= 1 and all(step["type"] in ("ByteLevel", "TemplateProcessing") for step in steps))
    for template in templates:
        for piece in template["single"]:
            if "SpecialToken" in piece:
                return tuple(template["special_tokens"][piece["SpecialToken"]["id"]]["ids"][:1])
    return ()


def _blocks(content: mmap.mmap, start: int, end: int) -> Iterator[list[list[str]]]:
    """The merges, thousands at a time. They are pairs, or strings with a space between (before tokenizers 0.20)."""
    pairs = content[start : start + 64].lstrip()[:1] == b"["
    between = _BETWEEN_PAIRS if pairs else _BETWEEN_TEXTS
    while start < end:
        found = between.search(content, min(start + _BLOCK_BYTES, end), end)
        stop = found.start(1) if found else end
        block = json.loads(b"[" + content[start:stop] + b"]")
        yield block if pairs else [merge.split(" ") for merge in block]
        start = stop + 1
