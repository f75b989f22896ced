"""Rows token by token: the texts make up the example, and what is trained is what stage dataset trains."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from hyperpod_ft.config.sections.inputs import Dataset
from hyperpod_ft.data.encoder import Encoder
from hyperpod_ft.data.inspection import shown
from hyperpod_ft.data.inspection.examples import ShownRow, inspect
from hyperpod_ft.data.inspection.raw_rows import RawRows
from hyperpod_ft.data.inspection.shown import ShownDocument
from hyperpod_ft.data.reading import BadRow, RawRow, chunks
from hyperpod_ft.data.text.formats import examples
from hyperpod_ft.data.tokenization import separated, tokenize_chunk
from hyperpod_ft.errors import UserError
from hyperpod_ft.shipped import shipped
from tests.unit import tiny_t5
from tests.unit.tiny_tokenizer import CHATML, EOS, make

TRL = {path.name: path.read_text() for path in (files("trl") / "chat_templates").iterdir() if path.suffix == ".jinja"}
TEMPLATES = ("qwen3", "qwen2_5", "llama3", "gptoss", "deepseek_r1_distill", "gemma", "glm4moe", "lfm2")
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
CONVERSATION = [
    {"role": "user", "content": "How many 🦊?\nCount the quick."},
    {"role": "assistant", "content": "Three quick foxes.", "reasoning_content": "Not the lame one."},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "ñandú ☃"},
]


def dataset(**values: Any) -> Dataset:
    return Dataset(**({"source": "./rows.jsonl", "max_length": 4096, "format": "chat"} | values))


def inspected(row: dict[str, Any], tokenizer: Any = None, **values: Any) -> ShownRow:
    return inspect(RawRow("rows.jsonl:1", row), Path(), dataset(**values), Encoder.of(tokenizer or make()))


def text_of(document: ShownDocument) -> str:
    return "".join(
        token for stretch in document.stretches if stretch.reason not in ("BOS", "EOS") for token in stretch.tokens
    )


def said(row: ShownRow, example: int = 0, document: int = 0) -> list[tuple[str, bool, str]]:
    """Stretches of a document: reason, whether trained, text."""
    stretches = row.examples[example].documents[document].stretches
    return [(one.reason, one.trained, "".join(one.tokens)) for one in stretches]


def texts(row: ShownRow, reason: str, example: int = 0) -> list[str]:
    return [text for found, _, text in said(row, example) if found == reason]


@pytest.mark.parametrize("name", [None, *TEMPLATES])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"train_on": "last_turn"},
        {"loss_on": "all"},
        {"reasoning": "context"},
        {"max_length": 200, "overlong": "truncate"},
    ],
    ids=str,
)
def test_texts_and_what_is_trained_are_those_of_stage_dataset(
    tmp_path: Path, name: str | None, settings: dict[str, Any]
) -> None:
    template = CHATML if name is None else TRL[f"{name}.jinja"]
    config, encoder = dataset(**settings), Encoder.of(make(template))
    row = {"messages": CONVERSATION}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (chunk,) = chunks(tmp_path)
    stage = tokenize_chunk(tmp_path, chunk, config, encoder)
    (made,) = separated([examples(config, row, encoder.tokenizer)], encoder)
    found = inspect(RawRow("rows.jsonl:1", row), Path(), config, encoder)
    assert found.is_used == bool(len(stage.tokens)) and len(found.examples) == len(made)
    trained, lengths = [], []
    for example, (document,) in zip(found.examples, made, strict=True):
        (one,) = example.documents
        whole = "".join(segment.text for segment in document.segments)
        assert text_of(one).removesuffix(EOS) == whole.removesuffix(EOS), "an EOS that is cut is not of the text"
        flags = [(stretch.reason, stretch.trained) for stretch in one.stretches for _ in range(stretch.count)]
        kept = [is_trained for reason, is_trained in flags if reason != "cut"]
        if not example.outcome.startswith("not trained"):
            trained += kept
            lengths.append(len(kept))
        assert sum(tally.tokens for tally in one.tallies) == one.tokens == len(flags)
    assert trained == stage.tokens.trained.tolist()
    assert lengths == stage.tokens.lengths.tolist()


def test_reasons_of_a_conversation() -> None:
    row = inspected({"messages": [{"role": "system", "content": "Be kind."}, *CONVERSATION]})
    assert [(reason, trained) for reason, trained, _ in said(row)] == [
        ("template", False),
        ("system", False),
        ("template", False),
        ("user", False),
        ("template", False),
        ("header", False),
        ("answer", True),
        ("end of turn", True),
        ("template", False),
        ("user", False),
        ("template", False),
        ("header", False),
        ("answer", True),
        ("end of turn", True),
    ]
    assert texts(row, "user") == [CONVERSATION[0]["content"], "a"], "not the a of a role's name"
    assert texts(row, "header") == ["<|im_start|>assistant\n"] * 2
    assert row.examples[0].turns == (3, 5)


def test_an_unrolled_conversation_says_which_turn_each_example_trains() -> None:
    row = inspected({"messages": CONVERSATION}, make(TRL["qwen3.jinja"]))
    assert [example.turns for example in row.examples] == [(2,), (4,)]
    assert texts(row, "reasoning") == ["Not the lame one."]
    assert texts(row, "answer") == ["Three quick foxes."]
    assert texts(row, "assistant", 1) == ["Three quick foxes."], "context, without its reasoning"
    assert texts(row, "reasoning", 1) == []
    assert ("template", True, "<think>\n\n</think>\n\n") in said(row, 1), "markup that the model must write"
    assert shown.heading(row.examples[1], 2, 2) == "example 2 of 2; trains message 4"


def test_reasoning_that_is_context_only() -> None:
    row = inspected({"messages": CONVERSATION[:2]}, make(TRL["qwen3.jinja"]), reasoning="context")
    assert ("reasoning", False, "Not the lame one.") in said(row)
    assert ("answer", True, "Three quick foxes.") in said(row)


def test_tool_calls_are_answers_and_results_are_of_tools() -> None:
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": '{"sky": "blue"}'},
        {"role": "assistant", "content": "Blue."},
    ]
    row = inspected({"messages": messages}, make(TRL["qwen3.jinja"]))
    calls = texts(row, "answer")
    assert len(calls) == 1 and calls[0].startswith("<tool_call>") and calls[0].endswith("</tool_call>")
    assert texts(row, "tool", len(row.examples) - 1) == ['{"sky": "blue"}']


def test_other_formats() -> None:
    pair = inspected({"prompt": "the 🦊 ", "completion": "quick"}, format="prompt-completion")
    assert said(pair) == [
        ("BOS", False, "<s>"),
        ("prompt", False, "the 🦊 "),
        ("completion", True, "quick"),
        ("EOS", True, "</s>"),
    ]
    counts = {tally.reason: (tally.tokens, tally.trained) for tally in pair.examples[0].documents[0].tallies}
    assert counts["prompt"][0] > len(pair.examples[0].documents[0].stretches[1].tokens), "a fox is four tokens"
    assert said(inspected({"text": "the fox"}, format="text"))[1:] == [("text", True, "the fox"), ("EOS", True, "</s>")]
    without = said(inspected({"text": "the fox"}, make(adds_bos=False), format="text"))
    assert without[0] == ("text", False, "the"), "nothing predicts a document's first token"
    both = inspected({"prompt": "the", "chosen": "quick", "rejected": "fox"}, format="preference")
    assert [one.name for one in both.examples[0].documents] == ["chosen", "rejected"]
    assert ("completion", True, "fox") in said(both, 0, 1)
    marked = {"prompt": "the", "completion": "fox", "label": False}
    (document,) = inspected(marked, format="unpaired-preference").examples[0].documents
    assert document.name == "undesirable"
    chosen = [{"role": "assistant", "content": "b"}]
    chats = inspected(
        {"prompt": CONVERSATION[:1], "chosen": chosen, "rejected": [{"role": "assistant", "content": "c"}]},
        format="preference",
    )
    assert ("answer", True, "c") in said(chats, 0, 1) and ("user", False, CONVERSATION[0]["content"]) in said(chats)


def test_an_encoder_decoder_has_two_ends(tmp_path: Path) -> None:
    tiny_t5.save(tmp_path / "t5", ["say red dog blue cat"])
    encoder = Encoder.load(tmp_path / "t5", chat=False)
    config = dataset(format="prompt-completion", max_target_length=32)
    row = inspect(RawRow("a:1", {"prompt": "say red  dog", "completion": "dog {red}"}), Path(), config, encoder)
    assert [(reason, trained) for reason, trained, _ in said(row)] == [
        ("prompt", False),
        ("EOS", False),
        ("completion", True),
        ("EOS", True),
    ]
    assert text_of(row.examples[0].documents[0]) == "say red  dogdog {red}"


def test_examples_that_are_cut_or_dropped() -> None:
    pair = {"prompt": "the quick brown", "completion": "fox" * 30}
    dropped = inspected(pair, format="prompt-completion", max_length=20)
    assert dropped.bad and not dropped.is_used
    assert str(dropped.bad) == "rows.jsonl:1 (longer than max_length: 65 tokens, dataset.max_length is 20)"
    assert dropped.examples[0].outcome.startswith("not trained: longer than max_length")
    assert dropped.examples[0].documents[0].trained == 0
    cut = inspected(pair, format="prompt-completion", max_length=20, overlong="truncate")
    assert cut.is_used and cut.examples[0].outcome == "cut to dataset.max_length"
    assert [(tally.reason, tally.tokens) for tally in cut.examples[0].documents[0].tallies] == [
        ("prompt", 3),
        ("completion", 16),
        ("BOS", 1),
        ("cut", 45),
    ]
    full = inspected(pair | {"prompt": "the " * 30}, format="prompt-completion", max_length=20, overlong="truncate")
    assert not full.is_used and full.bad is None
    assert full.examples[0].outcome == "not trained: its prompt fills dataset.max_length"


def test_bad_rows_say_what_stage_dataset_says() -> None:
    row = inspected({"prompt": "a"}, format="prompt-completion")
    assert str(row.bad) == "rows.jsonl:1 (missing field 'completion': the row has prompt)" and row.examples == ()
    unread = BadRow("rows.jsonl:2", "invalid JSON")
    assert inspect(unread, Path(), dataset(), Encoder.of(make())).bad is unread
    with pytest.raises(UserError, match="does not use column images"):
        inspected({"prompt": "a", "completion": "b", "images": ["x"]}, format="prompt-completion")


def test_both_libraries_show_the_same(tmp_path: Path) -> None:
    """Of a model that tiktoken tokenizes, without the tokenizer of transformers."""
    model = shipped("examples") / "quickstart" / "tiny-llama"
    row = RawRow("a:1", {"prompt": "Run it 🦊 ", "completion": "--time=1"})
    config = dataset(format="prompt-completion")
    fast, slow = Encoder.load(model, chat=False), Encoder.load(model, chat=True)
    assert fast.tokenizer is None and slow.tokenizer is not None
    assert inspect(row, Path(), config, fast) == inspect(row, Path(), config, slow)


def test_what_is_kept_with_a_dataset_is_bounded(tmp_path: Path) -> None:
    encoder, config = Encoder.of(make()), dataset(format="text", max_length=1 << 16)
    (example,) = inspect(RawRow("a:1", {"text": "fox " * 2000}), Path(), config, encoder).examples
    (document,) = example.documents
    tokens = [
        shown.ShownToken(text, stretch.trained, stretch.reason)
        for stretch in document.stretches
        for text in stretch.tokens
    ]
    small = ShownDocument.of("", tokens, bounded=True)
    assert small.tallies == document.tallies
    (hidden,) = [stretch for stretch in small.stretches if stretch.reason == "not shown"]
    assert sum(len(stretch.tokens) for stretch in small.stretches) == 1001
    assert hidden.count == document.tokens - 1000
    shown.write(tmp_path, [shown.ShownExample("a:1", (), "", (small,))])
    assert shown.read(tmp_path)[0].documents == (small,)
    assert (tmp_path / "shown.json").stat().st_size < 20_000
    (tmp_path / "shown.json").write_text('[{"where": 1}]')
    assert shown.read(tmp_path) == ()
    assert shown.read(tmp_path / "missing") == ()


def test_rows_by_number_and_by_chance(tmp_path: Path) -> None:
    for name, first in (("a.jsonl", 0), ("b.jsonl", 3)):
        (tmp_path / name).write_text("".join(json.dumps({"n": first + n}) + "\n\n" for n in range(3)))
    rows = RawRows(tmp_path, chunks(tmp_path))
    assert [row.values["n"] for row in rows if isinstance(row, RawRow)] == list(range(6))
    assert rows.numbered(5) == RawRow("b.jsonl:3", {"n": 4})
    with pytest.raises(UserError, match="row 7: the dataset has 6 rows"):
        rows.numbered(7)
    drawn = rows.sampled(4, seed=1)
    assert drawn == rows.sampled(4, seed=1) and len(drawn) == 4
    assert drawn == sorted(drawn, key=lambda row: row.where)
    assert rows.sampled(99, seed=1) == list(rows)
