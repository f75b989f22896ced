"""Preference rows: their two documents, what is trained of them, and how pairs are cut and packed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.conversations import CALL, TOOLS, templates
from hyperpod_ft.config.sections.inputs import Dataset
from hyperpod_ft.data.encoder import Encoder
from hyperpod_ft.data.packing import IGNORED, fill, pack
from hyperpod_ft.data.reading import chunks
from hyperpod_ft.data.text import chat
from hyperpod_ft.data.text.example import Example, RowError
from hyperpod_ft.data.text.formats import examples, prompt_of
from hyperpod_ft.data.tokenization import TokenizedChunk, tokenize, tokenize_chunk
from tests.unit.tiny_tokenizer import CHATML_MARKED, make

TOKENIZER: Any = make()
QUESTION, EARLIER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}


def dataset(**values: Any) -> Dataset:
    return Dataset(**({"source": "./rows.jsonl", "max_length": 64, "format": "preference"} | values))


def documents(row: dict[str, Any], tokenizer: Any) -> tuple[Example, ...]:
    (found,) = examples(dataset(), row, tokenizer)
    return found


def trained_text(example: Example) -> str:
    return "".join(segment.text for segment in example.segments if segment.trained)


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_strings_are_continued() -> None:
    row = {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}
    pair = documents(row, TOKENIZER)
    assert [trained_text(example) for example in pair] == [" blue.", " green."]
    assert [example.prompt for example in pair] == ["The sky is"] * 2 == [prompt_of(dataset(), row, TOKENIZER)] * 2


def test_tools_and_settings_of_the_template_belong_to_both() -> None:
    tokenizer: Any = make(templates()["qwen3"])
    row = {"prompt": [QUESTION], "chosen": [CALL], "rejected": [answer("No")], "tools": TOOLS}
    config = dataset(chat_template_kwargs={"enable_thinking": False})
    ((call, refusal),) = examples(config, row, tokenizer)
    assert call.prompt == refusal.prompt == prompt_of(config, row, tokenizer)
    assert "get_weather" in call.prompt and call.prompt.endswith("<think>\n\n</think>\n\n")
    assert '"arguments": {"place": "Bern", "days": 2}' in trained_text(call) and trained_text(refusal) == "No<|im_end|>"


@pytest.mark.parametrize("template", [None, CHATML_MARKED])
@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [QUESTION, EARLIER, QUESTION], "chosen": [answer("Yes")], "rejected": [answer("No")]},
        {"prompt": [QUESTION, EARLIER, QUESTION], "chosen": "Yes", "rejected": "No"},
        {
            "prompt": [QUESTION, EARLIER, QUESTION],  # which the completions repeat
            "chosen": [QUESTION, EARLIER, QUESTION, answer("Yes")],
            "rejected": [QUESTION, EARLIER, QUESTION, answer("No")],
        },
        {
            "prompt": "Hi",  # as in UltraFeedback
            "chosen": [QUESTION, EARLIER, QUESTION, answer("Yes")],
            "rejected": [QUESTION, EARLIER, QUESTION, answer("No")],
        },
        {
            "chosen": [QUESTION, EARLIER, QUESTION, answer("Yes")],
            "rejected": [QUESTION, EARLIER, QUESTION, answer("No")],
        },
    ],
)
def test_messages_are_templated_and_what_both_share_is_the_prompt(row: dict[str, Any], template: str | None) -> None:
    tokenizer: Any = make(*([template] if template else []))
    pair = documents(row, tokenizer)
    messages = [QUESTION, EARLIER, QUESTION]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    for example, expected in zip(pair, ("Yes", "No"), strict=True):
        assert example.prompt == prompt and example.completion == expected
        assert trained_text(example).startswith(expected) and "Hello" not in trained_text(example)
        whole = tokenizer.apply_chat_template([*messages, answer(expected)], tokenize=False)
        assert "".join(segment.text for segment in example.segments) == whole.rstrip()
    if isinstance(row.get("prompt"), list):
        assert prompt_of(dataset(), row, tokenizer) == prompt


def test_a_text_prompt_is_the_users_message() -> None:
    row = {"prompt": "Hi", "chosen": [answer("Yes")], "rejected": [answer("No")]}
    as_messages = row | {"prompt": [QUESTION]}
    assert documents(row, TOKENIZER) == documents(as_messages, TOKENIZER)


def test_all_turns_after_what_is_shared_are_trained() -> None:
    row = {
        "chosen": [QUESTION, EARLIER, {"role": "user", "content": "Why?"}, answer("So.")],
        "rejected": [QUESTION, answer("No"), {"role": "user", "content": "Why?"}, answer("So.")],
    }
    pair = documents(row, TOKENIZER)
    assert ["Hello!" in trained_text(pair[0]), "No" in trained_text(pair[1])] == [True, True]
    assert all("So." in trained_text(example) and "Why" not in trained_text(example) for example in pair)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a", "chosen": "b"}, "missing field 'rejected'"),
        ({"chosen": "b", "rejected": "c"}, "missing field 'prompt'"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are the same"),
        ({"prompt": "a", "chosen": "b", "rejected": " "}, "empty completion"),
        (
            {"prompt": "a", "chosen": "b", "rejected": [answer("c")]},
            "fields 'chosen' and 'rejected' are neither two strings nor two lists of messages",
        ),
        (
            {"prompt": 3, "chosen": [answer("b")], "rejected": [answer("c")]},
            "field 'prompt' is neither a string nor a list of messages",
        ),
        ({"chosen": [QUESTION], "rejected": [answer("c")]}, "last message is not from the assistant"),
        ({"chosen": ["b"], "rejected": [answer("c")]}, "message without a role"),
    ],
)
def test_unusable_rows(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowError) as refused:
        documents(row, TOKENIZER)
    assert refused.value.reason == reason


def unpaired(row: dict[str, Any], tokenizer: Any = TOKENIZER) -> Example:
    (found,) = examples(dataset(format="unpaired-preference"), row, tokenizer)
    return found[0]


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [
        ("The sky is", " blue."),
        ([QUESTION], "Yes"),
        ("Hi", [answer("Yes")]),
        ([QUESTION, EARLIER, QUESTION], [QUESTION, EARLIER, QUESTION, answer("Yes")]),
        ([QUESTION], [EARLIER, QUESTION, answer("Yes")]),
    ],
)
def test_an_unpaired_completion_is_written_as_one_of_a_pair(prompt: Any, completion: Any) -> None:
    other = " green." if isinstance(completion, str) else [answer("No")]
    row = {"prompt": prompt, "completion": completion, "label": False}
    made = unpaired(row)
    assert made == replace(documents(row | {"chosen": completion, "rejected": other}, TOKENIZER)[0], desirable=False)
    assert prompt_of(dataset(format="unpaired-preference"), row, TOKENIZER) == (
        prompt if isinstance(prompt, str) else chat.prompt(prompt, TOKENIZER)
    )


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a", "completion": "b"}, "missing field 'label'"),
        ({"prompt": "a", "completion": "b", "label": 1}, "field 'label' is neither true nor false"),
        ({"prompt": "a", "completion": " ", "label": True}, "empty completion"),
        ({"completion": [QUESTION, answer("b")], "label": True}, "missing field 'prompt'"),
        (
            {"prompt": "a", "completion": [], "label": True},
            "field 'completion' is neither a string nor a list of messages",
        ),
        (
            {"prompt": "a", "completion": [QUESTION, answer("b")], "label": True},
            "field 'completion' does not follow the prompt",
        ),
        (
            {"prompt": 3, "completion": [answer("b")], "label": True},
            "field 'prompt' is neither a string nor a list of messages",
        ),
        ({"prompt": [QUESTION], "completion": [QUESTION], "label": True}, "last message is not from the assistant"),
    ],
)
def test_unusable_unpaired_rows(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowError) as refused:
        unpaired(row)
    assert refused.value.reason == reason


def test_special_tokens_are_added_to_strings_alone() -> None:
    """A chat template writes its own."""
    strings = documents({"prompt": "the", "chosen": "fox", "rejected": "quick"}, TOKENIZER)
    chats = documents({"prompt": [QUESTION], "chosen": "fox", "rejected": "quick"}, TOKENIZER)
    tokens = tokenize([*strings, *chats], dataset(), Encoder.of(TOKENIZER))
    found = [
        tokens.ids[start : start + length].tolist() for start, length in zip(tokens.starts, tokens.lengths, strict=True)
    ]
    bos, eos = TOKENIZER.bos_token_id, TOKENIZER.eos_token_id
    assert all(ids[0] == bos and ids.count(bos) == 1 for ids in found)
    assert [ids.count(eos) for ids in found] == [1, 1, 0, 0]
    assert (tokens.label_tokens > 0).all()


def chunk_of(tmp_path: Path, rows: list[dict[str, str]], **values: Any) -> TokenizedChunk:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (only,) = chunks(tmp_path)
    return tokenize_chunk(tmp_path, only, dataset(**values), Encoder.of(TOKENIZER))


def test_long_pairs_are_dropped_or_cut(tmp_path: Path) -> None:
    """Together they fit a row: the longer one is cut first, and a pair with nothing left to learn is dropped."""
    short, long = "fox", "x" * 80
    rows = [
        {"prompt": "a", "chosen": short, "rejected": "b"},
        {"prompt": "a", "chosen": long, "rejected": short},
        {"prompt": "a", "chosen": long, "rejected": f"{long}b"},
        {"prompt": long, "chosen": short, "rejected": "b"},
    ]
    dropped = chunk_of(tmp_path, rows)
    assert dropped.origins[:, 0].tolist() == [0] and len(dropped.tokens) == 2
    assert [row.where for row in dropped.counts.listed] == [f"rows.jsonl:{line}" for line in (2, 3, 4)]
    assert dropped.counts.listed[1].detail == "167 tokens, dataset.max_length is 64"
    cut = chunk_of(tmp_path, rows, overlong="truncate")
    assert cut.origins[:, 0].tolist() == [0, 1, 2]
    assert (cut.counts.truncated, cut.counts.emptied, cut.counts.bad.total()) == (2, 1, 0)
    whole = cut.tokens.lengths[3]  # BOS, prompt, fox, EOS
    assert cut.tokens.lengths[2:].tolist() == [64 - whole, whole, 32, 32]


@pytest.mark.parametrize("how", ["bfd", "none"])
def test_both_documents_of_a_pair_are_in_one_row_in_order(how: Any) -> None:
    random = np.random.default_rng(1)
    lengths = random.integers(1, 16, 60)
    starts = np.cumsum(lengths) - lengths
    # a token's id is the number of its document
    ids = np.repeat(np.arange(60), lengths).astype(np.int32)
    order = random.permutation(30)[:20]
    layout = pack(how, starts.reshape(-1, 2)[order], lengths.reshape(-1, 2)[order], 32, 0)
    rows = fill(layout, ids, np.ones(len(ids), np.bool_), 0, layout.row_count, 32, 99)
    found: list[int] = []
    for row, positions, labels in zip(rows.input_ids, rows.position_ids, rows.labels, strict=True):
        begins = np.flatnonzero((positions == 0) & (row != 99))
        numbers = row[begins]
        assert (numbers[::2] % 2 == 0).all() and (numbers[1::2] == numbers[::2] + 1).all()
        assert np.array_equal(np.bincount(row[row != 99], minlength=60)[numbers], lengths[numbers])
        assert (labels[row == 99] == IGNORED).all()
        found += numbers[::2].tolist()
    assert sorted(found) == sorted((2 * order).tolist())
    if how == "bfd":
        assert layout.row_count < 20
