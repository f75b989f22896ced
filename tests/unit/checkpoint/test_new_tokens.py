"""A model that gets more tokens: files of every form, and tokenizers as transformers loads them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, models
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    T5Config,
)

from hyperpod_ft.checkpoint import new_tokens
from hyperpod_ft.checkpoint.formats import added_tokens, model_directory
from hyperpod_ft.checkpoint.formats.pretrained import auto_class, load
from hyperpod_ft.checkpoint.tensors import reading
from hyperpod_ft.checkpoint.tensors.direct import BLOCK_BYTES
from hyperpod_ft.checkpoint.verify.verify import verify
from hyperpod_ft.data.encoder import Encoder, RankedBackend
from hyperpod_ft.errors import UserError
from tests.unit import tiny_image_text, tiny_t5, tiny_tokenizer
from tests.unit.tiny_families import SIZES

TOOLS = ("<tool>", "</tool>")
SIZE = 312  # of the tiny tokenizer
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Tensors = dict[str, torch.Tensor]


def model(directory: Path, vocabulary: int = SIZE, *, shard: str = "1GB", **changes: Any) -> Tensors:
    """A tiny Llama in bfloat16 with its tokenizer; its tensors."""
    tiny_tokenizer.save(directory, tiny_tokenizer.make())
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    made: Any = LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **sizes | changes))
    made.to(torch.bfloat16).save_pretrained(directory, max_shard_size=shard)
    return tensors_in(directory)


def tensors_in(directory: Path) -> Tensors:
    return {name: value for file in directory.glob("*.safetensors") for name, value in load_file(file).items()}


def config_of(directory: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return values


def with_rows(old: torch.Tensor, rows: int, new: slice) -> torch.Tensor:
    """By the definition."""
    found = torch.cat([old, torch.zeros(rows - len(old), *old.shape[1:], dtype=old.dtype)])
    found[new] = old[: new.start].double().mean(0).to(old.dtype)
    return found


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("vocabulary", "rows", "new"), [(SIZE, 320, slice(312, 320)), (400, 400, slice(312, 314))])
def test_each_token_has_a_row_that_is_the_mean(
    tmp_path: Path, tied: bool, vocabulary: int, rows: int, new: slice
) -> None:
    """Where the vocabulary has room, no row is added, and those of no token stay as they are."""
    before = model(tmp_path, vocabulary, tie_word_embeddings=tied)
    assert new_tokens.add_tokens(tmp_path, TOOLS) == f"2 tokens and {rows - vocabulary} rows added"
    after = tensors_in(tmp_path)
    assert after.keys() == before.keys() and (HEAD in after) != tied
    for name, value in before.items():
        expected = with_rows(value, rows, new) if name in (EMBEDDING, HEAD) else value
        assert torch.equal(after[name], expected), name
    assert config_of(tmp_path)["vocab_size"] == rows
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("a<tool>b</tool>", add_special_tokens=False)["input_ids"]
    assert {312, 313} < set(ids) and tokenizer.decode(ids, skip_special_tokens=True) == "a<tool>b</tool>"
    assert not list(tmp_path.glob(".*"))


def test_other_files_are_not_written_and_links_not_changed(tmp_path: Path) -> None:
    """Of a model in shards, of which the fetched one keeps all."""
    fetched, extended = tmp_path / "fetched", tmp_path / "extended"
    before = model(fetched, shard="40KB")
    extended.mkdir()
    for file in fetched.iterdir():
        (extended / file.name).hardlink_to(file)
    new_tokens.add_tokens(extended, TOOLS)
    assert {name: value.shape for name, value in tensors_in(fetched).items()} == {n: v.shape for n, v in before.items()}
    assert config_of(fetched)["vocab_size"] == SIZE and "<tool>" not in (fetched / "tokenizer.json").read_text()
    index = json.loads((extended / "model.safetensors.index.json").read_text())
    written = {index["weight_map"][name] for name in (EMBEDDING, HEAD)}
    names = {file.name for file in fetched.glob("*.safetensors")}
    assert len(names) > 3 and len(written) == 2
    assert {name for name in names if not (extended / name).samefile(fetched / name)} == written
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in tensors_in(extended).values())
    AutoModelForCausalLM.from_pretrained(extended)


def test_the_notes_of_a_file_stay(tmp_path: Path) -> None:
    file, before = tmp_path / "model.safetensors", model(tmp_path)
    save_file(before, file, {"format": "pt", "made": "by hand"})
    new_tokens.add_tokens(tmp_path, TOOLS)
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt", "made": "by hand"}


def test_memory_does_not_grow_with_the_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model(tmp_path, 4 * BLOCK_BYTES // 64 // 2, num_hidden_layers=1)
    asked, fill = list[int](), reading.fill

    def recorded(tensor: Any, begin: int, end: int, out: Any) -> None:
        asked.append(out.nbytes)
        fill(tensor, begin, end, out)

    monkeypatch.setattr(reading, "fill", recorded)
    new_tokens.add_tokens(tmp_path, TOOLS)
    assert max(asked) <= BLOCK_BYTES and sum(asked) > 2 * 4 * BLOCK_BYTES


def test_layers_that_predict_several_tokens_get_the_rows(tmp_path: Path) -> None:
    """As DeepSeek-V3 and GLM-4.5 name them, after the last layer. `verify` takes that for new tokens too."""
    base, tuned = tmp_path / "base", tmp_path / "tuned"
    tensors = model(base)
    ahead = {"model.layers.2.embed_tokens.weight": EMBEDDING, "model.layers.2.shared_head.head.weight": HEAD}
    tensors |= {name: tensors[of].clone() for name, of in ahead.items()}
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    shutil.copytree(base, tuned)
    new_tokens.add_tokens(tuned, TOOLS)
    after = tensors_in(tuned)
    assert all(torch.equal(after[name], after[of]) and len(after[of]) == 320 for name, of in ahead.items())
    after["model.norm.weight"] += 0.25
    save_file(after, tuned / "model.safetensors", {"format": "pt"})
    assert verify(tuned, base=base).ok


def of_transformers_4(directory: Path) -> None:
    """tokenizer_config.json and added_tokens.json as its versions wrote them."""
    added = json.loads((directory / "tokenizer.json").read_text())["added_tokens"]
    settings = json.loads((directory / "tokenizer_config.json").read_text()) | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "extra_special_tokens": {},
        "added_tokens_decoder": {
            str(token["id"]): {key: value for key, value in token.items() if key != "id"} for token in added
        },
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "added_tokens.json").write_text(json.dumps({token["content"]: token["id"] for token in added}))


def of_unigram(directory: Path) -> None:
    pieces = [("<s>", 0.0), ("</s>", 0.0), ("a", -1.0), ("b", -2.0)]
    unigram = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.Unigram(pieces, 0)), eos_token="</s>")
    unigram.add_tokens(["<extra>"])
    unigram.save_pretrained(directory)


def of_qwen2(directory: Path) -> None:
    """Of whose files transformers 5 takes only the vocabulary, and adds a token of its own unless it is there."""
    made = tiny_tokenizer.make()
    made.add_tokens(["<|endoftext|>"], special_tokens=True)
    tiny_tokenizer.save(directory, made)
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen2"}))


@pytest.mark.parametrize("change", [lambda _: None, of_transformers_4, of_unigram, of_qwen2])
def test_ids_are_those_that_transformers_gives(tmp_path: Path, change: Callable[[Path], None]) -> None:
    tiny_tokenizer.save(tmp_path, tiny_tokenizer.make())
    change(tmp_path)
    asked = ["</s>", "a", "<tool>", "the", " the", "</tool>"]  # "the" is in one of the vocabularies
    by_hand = AutoTokenizer.from_pretrained(tmp_path)
    by_hand.add_tokens([AddedToken(token, normalized=False) for token in asked[1:]])
    added_tokens.add(tmp_path, asked[1:], asked[:1])
    found = AutoTokenizer.from_pretrained(tmp_path)
    assert found.get_added_vocab() == by_hand.get_added_vocab() and len(found) == len(by_hand)
    text = "b<tool> the a</tool>thethe"
    assert found(text)["input_ids"] == by_hand(text)["input_ids"]
    known = added_tokens.numbered(tmp_path, asked[1:], asked[:1])
    assert not known.new and known.rows(len(found)) == len(found)
    assert known.known == {token: by_hand.convert_tokens_to_ids(token) for token in asked}
    if older := [file for file in [tmp_path / "added_tokens.json"] if file.exists()]:
        assert json.loads(older[0].read_text())["<tool>"] == by_hand.convert_tokens_to_ids("<tool>")


def of_older_maps(directory: Path) -> None:
    """Its special tokens are in special_tokens_map.json alone, and one as transformers 4 wrote it in full."""
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    start, end = settings.pop("extra_special_tokens")
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    named = {"__type": "AddedToken", "content": end, "lstrip": False, "rstrip": False, "normalized": False}
    (directory / "special_tokens_map.json").write_text(json.dumps({"additional_special_tokens": [start, named]}))


@pytest.mark.parametrize("change", [lambda _: None, of_transformers_4, of_qwen2, of_older_maps])
def test_special_ones_are_left_out_of_answers(tmp_path: Path, change: Callable[[Path], None]) -> None:
    """Also one that the tokenizer has and that is not special there; those that were special stay so."""
    made = tiny_tokenizer.make()
    made.add_tokens(["<plain>"])
    tiny_tokenizer.save(tmp_path, made)
    change(tmp_path)
    before = AutoTokenizer.from_pretrained(tmp_path).all_special_tokens
    added_tokens.add(tmp_path, ["<tool>"], ["<|call|>", "<|im_end|>", "<plain>"])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("<tool>a<plain><|call|>", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<tool>a"
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).decode(ids) == "<tool>a"
    assert ids[-1] in tokenizer.all_special_ids and ids[0] not in tokenizer.all_special_ids
    assert set(before) < set(tokenizer.all_special_tokens)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    listed = settings.get("additional_special_tokens") or settings["extra_special_tokens"]
    assert json.dumps(listed).count("<|im_end|>") <= 1
    described = settings.get("added_tokens_decoder", {}).values()
    assert all(token["special"] for token in described if token["content"] == "<plain>")


def test_the_fast_encoder_knows_them(tmp_path: Path) -> None:
    tiny_tokenizer.save(tmp_path, tiny_tokenizer.make(chat_template=None))
    added_tokens.add(tmp_path, TOOLS)
    encoder = Encoder.load(tmp_path, chat=False)
    assert isinstance(encoder.backend, RankedBackend)
    text = "the<tool>fox</tool>"
    expected = AutoTokenizer.from_pretrained(tmp_path)(text, add_special_tokens=False)["input_ids"]
    assert encoder.backend.encode([text]).ids.tolist() == expected and 312 in expected


def test_what_the_tokenizer_has_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And no file of weights is written, also where other tokens have no rows."""
    model(tmp_path)
    added_tokens.add(tmp_path, ["<without a row>"])
    before = (tmp_path / "model.safetensors").stat()
    assert new_tokens.add_tokens(tmp_path, ["the"], ["<|im_start|>"]) == "0 tokens and 0 rows added"
    assert "tokens already: 'the', '<|im_start|>'" in capsys.readouterr().out
    assert (tmp_path / "model.safetensors").stat() == before


FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    # with a bias of the output layer; with two embeddings; untied in files that do not say so; with a shared embedding
    "gptj": lambda: AutoConfig.for_model("gptj", **SIZES | {"vocab_size": SIZE, "rotary_dim": 8}),
    "gemma4": lambda: tiny_image_text.config_of("gemma4", vocab_size=SIZE),
    "llava": lambda: tiny_image_text.config_of("llava", vocab_size=SIZE),
    "t5": lambda: tiny_t5.config(vocab_size=SIZE),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_with_other_names_compute_with_them(tmp_path: Path, family: str) -> None:
    tiny_tokenizer.save(tmp_path, tiny_tokenizer.make())
    config = FAMILIES[family]()
    if isinstance(config, T5Config):
        tiny_t5.save_model(tmp_path, config)
        shared = load_file(tmp_path / "model.safetensors")
        shared |= {name: shared["shared.weight"].clone() for name in model_directory.SHARED_ALIASES}
        save_file(shared, tmp_path / "model.safetensors", {"format": "pt"})
    else:
        auto_class(config.to_dict()).from_config(config).save_pretrained(tmp_path)
    new_tokens.add_tokens(tmp_path, TOOLS)
    loaded: Any = load(tmp_path, torch.float32)
    ids = torch.tensor([[5, 312, 313, 319]])
    decoder = {"decoder_input_ids": ids} if family == "t5" else {}
    with torch.no_grad():
        logits = loaded(input_ids=ids, **decoder).logits
    assert logits.shape == (1, 4, 320) and loaded.get_input_embeddings().weight.shape[0] == 320
    expected = (logits[..., :312].mean(-1, keepdim=True) - logits[..., 312:]).abs().max()
    assert expected < 1e-5, "the logit of a new token is the mean of the others"


def test_tokens_of_the_tokenizer_that_have_no_rows_get_them(tmp_path: Path) -> None:
    """Added with transformers, as when a chat template needs them."""
    before = model(tmp_path)
    added_tokens.add(tmp_path, ["<user>", *TOOLS])
    assert new_tokens.add_tokens(tmp_path, TOOLS) == "0 tokens and 8 rows added"
    assert torch.equal(tensors_in(tmp_path)[HEAD], with_rows(before[HEAD], 320, slice(312, 320)))
    assert added_tokens.numbered(tmp_path, TOOLS).known == {"<tool>": 313, "</tool>": 314}


def test_tokens_that_transformers_does_not_load_are_refused(tmp_path: Path) -> None:
    """Of a Qwen2, it takes those of tokenizer_config.json, if that lists any."""
    of_qwen2(tmp_path)
    added_tokens.add(tmp_path, TOOLS)
    known = added_tokens.numbered(tmp_path, TOOLS).known
    Encoder.load(tmp_path, chat=False).check_ids(known)
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"added_tokens_decoder": {}}))
    with pytest.raises(UserError, match=r"^model\.new_tokens: '<tool>' is 313 in tokenizer\.json, and \[\d+, "):
        Encoder.load(tmp_path, chat=False).check_ids(known)


def without_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()


def of_other_names(directory: Path) -> None:
    renamed = {name.replace("embed_tokens", "cells"): value for name, value in tensors_in(directory).items()}
    save_file(renamed, directory / "model.safetensors")


def with_values(name: str, **values: Any) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        (directory / name).write_text(json.dumps(json.loads((directory / name).read_text()) | values))

    return change


def with_id(number: int) -> Callable[[Path], None]:
    """Of a token in the vocabulary."""

    def change(directory: Path) -> None:
        values = json.loads((directory / "tokenizer.json").read_text())
        values["model"]["vocab"]["<odd>"] = number
        (directory / "tokenizer.json").write_text(json.dumps(values))

    return change


SETTINGS = "tokenizer_config.json"


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        (without_tokenizer, r"^model\.new_tokens: .*has no tokenizer\.json"),
        (of_other_names, r"^model\.new_tokens: .*names of the model's embedding and output layer are not known"),
        (with_values("config.json", vocab_size=SIZE - 8), r"^model\.new_tokens: .*matrices for 304 and 312 tokens"),
        (with_values("config.json", vocab_size=[SIZE]), r"config\.json: vocab_size: "),
        (with_id(2_000_000), r"^model\.new_tokens: .*tokenizer\.json: the id of '<odd>'.* far above its 313 tokens"),
        (with_id(-7), r"^model\.new_tokens: .*tokenizer\.json: the id of '<odd>' is negative"),
        (with_id(SIZE + 2), r"^model\.new_tokens: .*tokenizer\.json has a token with the id of '</tool>'"),
        (with_values(SETTINGS, added_tokens_decoder=None), r"tokenizer_config\.json: added_tokens_decoder: "),
        (with_values(SETTINGS, added_tokens_decoder=[]), r"tokenizer_config\.json: added_tokens_decoder: "),
        (with_values(SETTINGS, additional_special_tokens="<x>"), r"_config\.json: additional_special_tokens: "),
        (lambda directory: added_tokens.add(directory, [], TOOLS), r"^model\.new_tokens: '<tool>' is a special token"),
    ],
)
def test_what_cannot_be_extended_is_refused(tmp_path: Path, change: Callable[[Path], None], refusal: str) -> None:
    model(tmp_path)
    change(tmp_path)
    with pytest.raises(UserError, match=refusal) as found:
        new_tokens.add_tokens(tmp_path, TOOLS)
    assert "\n" not in str(found.value)


def test_sizes_that_a_file_leaves_empty_are_no_error(tmp_path: Path) -> None:
    model(tmp_path, shard="40KB")
    with_values("config.json", vocab_size=None)(tmp_path)
    with_values("model.safetensors.index.json", metadata={"total_size": None})(tmp_path)
    assert new_tokens.add_tokens(tmp_path, TOOLS) == "2 tokens and 8 rows added"


@pytest.mark.parametrize("token", ["°", "größer"])  # one that the vocabulary has, one that is new
def test_tokens_that_a_byte_level_tokenizer_takes_for_bytes_are_refused(tmp_path: Path, token: str) -> None:
    tiny_tokenizer.save(tmp_path, tiny_tokenizer.make(chat_template=None))
    added_tokens.add(tmp_path, [" lead", token])
    known = dict(added_tokens.numbered(tmp_path, [" lead", token]).known)
    encoder = Encoder.load(tmp_path, chat=False)
    with pytest.raises(UserError, match=rf"^model\.new_tokens: .*decodes '{token}' as '.*\ufffd"):
        encoder.check_ids(known)
    encoder.check_ids({" lead": known[" lead"]})


def test_the_plan_knows_the_rows_before_they_are_there(tmp_path: Path) -> None:
    model(tmp_path)
    config = config_of(tmp_path)
    alone, whole = tmp_path / "config-alone", tmp_path
    assert added_tokens.with_room(config, alone, TOOLS)["vocab_size"] == 320, "at most"
    assert added_tokens.with_room(config | {"vocab_size": 400}, whole, TOOLS)["vocab_size"] == 400
    assert added_tokens.with_room(config, whole, TOOLS)["vocab_size"] == 320
    assert added_tokens.with_room(config, whole, ["the"], ["<s>"]) == config
    assert added_tokens.with_room(config, alone, []) == config
    outer = {"model_type": "some", "text_config": config}
    assert added_tokens.with_room(outer, whole, TOOLS)["text_config"]["vocab_size"] == 320
    new_tokens.add_tokens(whole, TOOLS)
    extended = config_of(whole)
    assert added_tokens.with_room(extended, whole, TOOLS) == extended
