"""tiktoken gives the ids of the `tokenizers` library, where it is taken; and where it must not be, it is not."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiktoken
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from hyperpod_ft.data import tokenizer
from hyperpod_ft.data.byte_level import bpe
from hyperpod_ft.data.encoder import Encoder, LibraryBackend, RankedBackend
from tests.unit.tiny_tokenizer import CHATML, make, save

GPT2, LLAMA3, TINY = bpe.PATTERNS
TINY_LLAMA = Path(__file__).resolve().parents[3] / "examples" / "quickstart" / "tiny-llama"
BOS, EOS, TURN = "<|begin_of_text|>", "<|end_of_text|>", "<|turn|>"
TEXT = [
    "The quick brown fox doesn't jump over 12345 lazy dogs; it's 3.14 o'clock.\n\n  Ünïcödé naïveté.\r\n",
    "def f(x):\n\treturn x ** 2  # 中文 текст\n\n\n    'quoted'   trailing   ",
    "She'd said: I'LL go! We've 1000000 reasons... <b>html</b> https://example.org/?q=1&r=2",
]
FRAGMENTS = [
    *("the quick brown fox", "a", "aaaaaaaaaa", " ", "  ", "   \n", "\n\n", "\t", "\r\n", "\u00a0", "\u2003", "\u3000"),
    *("don't", "DON'T", "'S", "ſ", "'ſ", "'ve", "’s", "12345", "1", "١٢٣", "Ⅷ²³½", "é", "e\u0301", "ß", "ǅ", "Ω"),
    *("中文字", "日本", "🙂", "👩‍👩‍👧", "\u200d", "\ufeff", "\x00", "\x7f", "\ue000", "\U0010ffff", "\u1c89"),
    *("_", "...", "##", "<", "|", "<|", "|>", BOS, EOS, TURN, BOS[:-1], BOS[1:], "<s>", "</s>", "<|im_end|>"),
]


def random_texts(count: int, seed: int = 0) -> list[str]:
    generator = random.Random(seed)
    return ["".join(generator.choices(FRAGMENTS, k=generator.randrange(25))) for _ in range(count)]


HARD = [
    "",
    " ",
    "\n",
    BOS,
    BOS + EOS,
    f"a{TURN}b",
    TURN * 3,
    " " * 3000 + "x",
    "\n" * 500,
    "ab" * 4000,
    *FRAGMENTS,
    *TEXT,
]


def learned(pattern: str, *, every_cut: bool = False) -> Tokenizer:
    """Byte-level BPE of some hundred tokens, special ones last; `every_cut` is how transformers converts tiktoken's."""
    library = Tokenizer(models.BPE(ignore_merges=every_cut))
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    library.train_from_iterator([*TEXT * 3, *FRAGMENTS], trainer)
    if every_cut:
        vocabulary = dict(sorted(library.get_vocab().items(), key=lambda item: item[1]))
        cuts = [(token[:place], token[place:]) for token in vocabulary for place in range(1, len(token))]
        library.model = models.BPE(
            vocabulary, [cut for cut in cuts if cut[0] in vocabulary and cut[1] in vocabulary], ignore_merges=True
        )
    library.add_special_tokens([BOS, EOS, TURN])
    library.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, library.token_to_id(BOS))]),
        ]
    )
    return library


def model_of(directory: Path, library: Tokenizer, **named: str) -> Path:
    save(
        directory,
        PreTrainedTokenizerFast(tokenizer_object=library, **{"bos_token": BOS, "eos_token": EOS} | named),
    )
    return directory


def check(model: Path) -> None:
    """The same ids as transformers, of many texts at once and of each alone; the same special tokens."""
    encoder = Encoder.load(model, chat=False)
    assert isinstance(encoder.backend, RankedBackend)
    assert encoder.tokenizer is None
    loaded = tokenizer.load(model)
    expected = Encoder.of(loaded)
    assert (encoder.bos, encoder.eos, encoder.pad) == (expected.bos, expected.eos, expected.pad)
    for texts in ([], [""], HARD, random_texts(400), ["no boundary", "a \U0010ffff in it"]):
        made, wanted = encoder.backend.encode(texts), expected.backend.encode(texts)
        assert made.ids.dtype == wanted.ids.dtype == np.int32
        assert made.lengths.tolist() == wanted.lengths.tolist()
        assert made.ids.tolist() == wanted.ids.tolist()
    for text in HARD:
        assert encoder.backend.encode([text]).ids.tolist() == tokenizer.encode(loaded.backend_tokenizer, [text])[0]


@pytest.mark.parametrize("pattern", bpe.PATTERNS)
@pytest.mark.parametrize("every_cut", [False, True])
def test_the_same_ids(tmp_path: Path, pattern: str, every_cut: bool) -> None:
    check(model_of(tmp_path / "model", learned(pattern, every_cut=every_cut), pad_token=TURN))


def test_the_same_ids_as_the_tests_own_and_the_quickstarts_tokenizer(tmp_path: Path) -> None:
    save(tmp_path / "bos", make())
    save(tmp_path / "plain", make(adds_bos=False))
    for model in (tmp_path / "bos", tmp_path / "plain", TINY_LLAMA):
        check(model)


def test_merges_in_the_older_form(tmp_path: Path) -> None:
    model = model_of(tmp_path / "model", learned(LLAMA3))
    change(model, lambda file: file["model"].update(merges=[" ".join(merge) for merge in file["model"]["merges"]]))
    check(model)


def test_merges_are_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # tokens that look like the JSON around them
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    library.train_from_iterator(['"],["', '\\"],[\\"', '","', '"]', "}}", '"merges":['] * 5, trainer)
    library.add_special_tokens([BOS, EOS])
    model = model_of(tmp_path / "model", library)
    for size in (1, 7, 50):
        monkeypatch.setattr(bpe, "_BLOCK_BYTES", size)
        check(model)


def test_chats_have_both(tmp_path: Path) -> None:
    save(tmp_path, make(CHATML))
    encoder = Encoder.load(tmp_path, chat=True)
    assert isinstance(encoder.backend, RankedBackend)
    assert encoder.tokenizer is not None
    assert encoder.tokenizer.get_chat_template() == CHATML


def test_more_spaces_than_tiktoken_can_take(tmp_path: Path) -> None:
    model = model_of(tmp_path / "model", learned(LLAMA3))
    encoder = Encoder.load(model, chat=False)
    texts = ["before", " " * 1_200_000, "after"]
    made, wanted = encoder.backend.encode(texts), Encoder.of(tokenizer.load(model)).backend.encode(texts)
    assert made.lengths.tolist() == wanted.lengths.tolist()
    assert (made.ids == wanted.ids).all()


@pytest.mark.parametrize("part", [r"\p{L}", r"\p{N}", r"\s", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"])
def test_the_engines_agree_on_every_character(part: str) -> None:
    characters = [chr(point) for point in range(0x110000) if not 0xD800 <= point < 0xE000]
    before = "'" if "'" in part else ""
    text = "".join(before + character for character in characters)
    alone = {bytes([byte]): byte for byte in range(256)}
    ours = tiktoken.Encoding("bytes", pat_str=part, mergeable_ranks=alone, special_tokens={})
    # both leave out what does not match
    theirs = pre_tokenizers.Split(Regex(part), "removed", invert=True).pre_tokenize_str(text)
    assert bytes(ours.encode_ordinary(text)).decode() == "".join(piece for piece, _ in theirs)


def change(model: Path, edit: Callable[[dict[str, Any]], object], name: str = "tokenizer.json") -> None:
    file = json.loads((model / name).read_text())
    edit(file)
    (model / name).write_text(json.dumps(file, ensure_ascii=False, indent=2))


def swap_first_merges(file: dict[str, Any]) -> None:
    merges = file["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]


PLAIN = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word", "special"), False) | {"content": "x"}
EDITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a normalizer": lambda file: file.update(normalizer={"type": "NFC"}),
    "a space before": lambda file: file["pre_tokenizer"]["pretokenizers"][1].update(add_prefix_space=True),
    "another pattern": lambda file: file["pre_tokenizer"]["pretokenizers"][0].update(pattern={"Regex": "\\w+"}),
    "what matches is dropped": lambda file: file["pre_tokenizer"]["pretokenizers"][0].update(behavior="Removed"),
    "a third step": lambda file: file["pre_tokenizer"]["pretokenizers"].insert(
        0, {"type": "Digits", "individual_digits": True}
    ),
    "another order of merges": swap_first_merges,
    "a merge less": lambda file: file["model"]["merges"].pop(),
    "dropout": lambda file: file["model"].update(dropout=0.1),
    "bytes as tokens": lambda file: file["model"].update(byte_fallback=True),
    "a token that takes the space before": lambda file: file["added_tokens"][2].update(lstrip=True),
    "a whole-word token": lambda file: file["added_tokens"][2].update(single_word=True),
    "one special token the beginning of another": lambda file: file["added_tokens"][2].update(content=BOS[:-1]),
    "padding": lambda file: file.update(
        padding={
            "strategy": "BatchLongest",
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 1,
            "pad_type_id": 0,
            "pad_token": "a",
        }
    ),
}
CONFIG_EDITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "another class": lambda file: file.update(tokenizer_class="LlamaTokenizerFast"),
    "an unknown key": lambda file: file.update(split_special_tokens=True),
    "a special token of its own": lambda file: file.update(sep_token="<sep>"),
    "an added token of its own": lambda file: file.setdefault("added_tokens_decoder", {}).update({"9": PLAIN}),
    "an extra token of its own": lambda file: file.update(extra_special_tokens=["<sep>"]),
    "named extra tokens": lambda file: file.update(extra_special_tokens={"turn_token": TURN}),
}
MODEL_EDITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a family whose tokenizer transformers builds": lambda file: file.update(model_type="qwen2"),
}


@pytest.mark.parametrize("edit", [*EDITS, *CONFIG_EDITS, *MODEL_EDITS])
def test_what_tiktoken_cannot_do_is_left_to_the_library(tmp_path: Path, edit: str) -> None:
    model = model_of(tmp_path / "model", learned(LLAMA3))
    assert bpe.read(model) is not None
    for edits, name in (
        (EDITS, "tokenizer.json"),
        (CONFIG_EDITS, "tokenizer_config.json"),
        (MODEL_EDITS, "config.json"),
    ):
        if edit in edits:
            change(model, edits[edit], name)
    assert bpe.read(model) is None


@pytest.mark.parametrize("listed", [False, True])
def test_a_configuration_of_transformers_4(tmp_path: Path, listed: bool) -> None:
    model = model_of(tmp_path / "model", learned(LLAMA3))
    (model / "special_tokens_map.json").unlink(missing_ok=True)
    added = {
        str(token.pop("id")): token for token in json.loads((model / "tokenizer.json").read_text())["added_tokens"]
    }

    def older(file: dict[str, Any]) -> None:
        file.pop("extra_special_tokens", None)
        file.pop("added_tokens_decoder", None)
        file.update(tokenizer_class="PreTrainedTokenizerFast", additional_special_tokens=[TURN])
        if listed:
            file["added_tokens_decoder"] = added

    change(model, older, "tokenizer_config.json")
    check(model)
    # transformers reads it where added_tokens_decoder is missing
    (model / "special_tokens_map.json").write_text('{"bos_token": "<|bos|>"}')
    assert (bpe.read(model) is not None) == listed


def test_families_whose_tokenizer_transformers_builds() -> None:
    auto = pytest.importorskip("transformers.models.auto.tokenization_auto")
    suspects = getattr(auto, "MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS", None)
    if suspects is None:
        pytest.skip("transformers 4 takes the class from tokenizer_config.json")
    generic = {None, "PreTrainedTokenizerFast", "TokenizersBackend"}
    assert {family for family in suspects if auto.TOKENIZER_MAPPING_NAMES.get(family) not in generic} == set(
        bpe.REBUILT
    )


def test_the_library_is_what_it_is_left_to(tmp_path: Path) -> None:
    model = model_of(tmp_path / "model", learned(LLAMA3))
    change(model, EDITS["a normalizer"])
    encoder = Encoder.load(model, chat=False)
    assert isinstance(encoder.backend, LibraryBackend)
    assert encoder.backend.encode(["e\u0301"]).ids.tolist() == encoder.backend.encode(["é"]).ids.tolist()


def test_a_token_with_the_boundary_in_it(tmp_path: Path) -> None:
    library = learned(LLAMA3)
    library.add_special_tokens([AddedToken("<\U0010ffff>", normalized=False)])
    assert isinstance(Encoder.load(model_of(tmp_path / "model", library), chat=False).backend, LibraryBackend)


def test_damaged_or_missing_files_are_no_description(tmp_path: Path) -> None:
    model = model_of(tmp_path / "whole", learned(LLAMA3))
    content = (model / "tokenizer.json").read_bytes()
    for name, damaged in {"cut": content[: len(content) // 2], "empty": b"", "no-json": b"x" * 100}.items():
        shutil.copytree(model, tmp_path / name)
        (tmp_path / name / "tokenizer.json").write_bytes(damaged)
        assert bpe.read(tmp_path / name) is None
    assert bpe.read(tmp_path / "nothing") is None
