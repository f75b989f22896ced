"""Token ids and label masks, exactly."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hyperpod_ft.config.sections.inputs import Dataset
from hyperpod_ft.data.encoder import Encoder
from hyperpod_ft.data.reading import chunks
from hyperpod_ft.data.text.example import Example
from hyperpod_ft.data.text.formats import examples
from hyperpod_ft.data.tokenization import TokenizedChunk, tokenize, tokenize_chunk
from hyperpod_ft.data.tokenizer import bos_ids, encode, pad_id, prompt_ids
from tests.unit.tiny_tokenizer import CHATML, CHATML_MARKED, END, make

TOKENIZER: Any = make()
PLAIN: Any = make(adds_bos=False)


def render(config: Dataset, row: dict[str, Any], tokenizer: Any) -> Example:
    ((found,),) = examples(config, row, tokenizer)
    return found


def dataset(**values: Any) -> Dataset:
    return Dataset(**({"source": "./rows.jsonl", "max_length": 64} | values))


@dataclass(frozen=True)
class Tokenized:
    """One example as lists."""

    ids: list[int]
    trained: list[bool]


def several(config: Dataset, rows: list[dict[str, Any]], tokenizer: Any = TOKENIZER) -> list[Tokenized]:
    tokens = tokenize([render(config, row, tokenizer) for row in rows], config, Encoder.of(tokenizer))
    assert tokens.ids.dtype == np.int32
    assert len(tokens) == len(rows)
    return [
        Tokenized(tokens.ids[start : start + length].tolist(), tokens.trained[start : start + length].tolist())
        for start, length in zip(tokens.starts.tolist(), tokens.lengths.tolist(), strict=True)
    ]


def one(config: Dataset, row: dict[str, Any], tokenizer: Any = TOKENIZER) -> Tokenized:
    # between others, so that nothing of them gets into it
    return several(config, [row] * 3, tokenizer)[1]


def ids(text: str) -> list[int]:
    return encode(TOKENIZER.backend_tokenizer, [text])[0]


BOS, EOS = TOKENIZER.bos_token_id, TOKENIZER.eos_token_id


def test_prompt_completion_and_eos() -> None:
    made = one(dataset(format="prompt-completion"), {"prompt": "the quick", "completion": "fox"})
    prompt, completion = ids("the quick"), ids("fox")
    assert made.ids == [BOS, *prompt, *completion, EOS]
    assert made.trained == [False] * (1 + len(prompt)) + [True] * (len(completion) + 1)
    assert made.ids[: 1 + len(prompt)] == prompt_ids(TOKENIZER, "the quick")


def test_no_bos_where_the_tokenizer_adds_none() -> None:
    made = one(dataset(format="prompt-completion"), {"prompt": "the quick", "completion": "fox"}, PLAIN)
    assert made.ids == [*ids("the quick"), *ids("fox"), EOS]
    assert prompt_ids(PLAIN, "the quick") == ids("the quick")
    assert bos_ids(PLAIN) == []


def test_bos_is_not_doubled_when_the_text_has_it() -> None:
    assert prompt_ids(TOKENIZER, "<s>the") == [BOS, *ids("the")]
    assert one(dataset(format="text"), {"text": "<s>the"}).ids == [BOS, *ids("the"), EOS]


def test_loss_on_all_and_text_train_everything_but_the_first_token() -> None:
    # nothing in the document predicts its first token: the tokens before it in a packed row are another document's
    made = one(dataset(format="prompt-completion", loss_on="all"), {"prompt": "the", "completion": "fox"})
    assert made.trained == [False] + [True] * (len(made.ids) - 1)
    text = one(dataset(format="text"), {"text": "the fox"}, PLAIN)
    assert text.trained == [False] + [True] * (len(text.ids) - 1)


def test_the_boundary_is_the_same_as_at_generation() -> None:
    # " quick" is one token when "the quick" is encoded at once; encoded apart, "the " keeps its space
    made = one(dataset(format="prompt-completion"), {"prompt": "the ", "completion": "quick"})
    assert made.ids[:-1] == [*prompt_ids(TOKENIZER, "the "), *ids("quick")]
    assert made.ids[1:-1] != ids("the quick")


def test_chat_masks_and_special_tokens() -> None:
    messages = [
        {"role": "user", "content": "the"},
        {"role": "assistant", "content": "fox"},
        {"role": "user", "content": "how"},
        {"role": "assistant", "content": "many"},
    ]
    for template in (CHATML, CHATML_MARKED):
        tokenizer: Any = make(template)
        made = one(dataset(format="chat"), {"messages": messages}, tokenizer)
        expected: list[tuple[int, bool]] = [(BOS, False)]
        for user, answer in (("the", "fox"), ("how", "many")):
            expected += [(t, False) for t in ids(f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n")]
            expected += [(t, True) for t in ids(f"{answer}<|im_end|>")]
            expected += [(t, False) for t in ids("\n" if user == "the" else "")]
        assert list(zip(made.ids, made.trained, strict=True)) == expected
        assert made.ids.count(BOS) == 1
        assert made.ids.count(tokenizer.convert_tokens_to_ids(END)) == 4
        assert EOS not in made.ids  # the template closes its turns itself


def test_chat_gets_eos_where_the_template_does_not_close_the_turn() -> None:
    tokenizer: Any = make("{% for m in messages %}{{ m['content'] + '\n' }}{% endfor %}")
    messages = [{"role": "user", "content": "the"}, {"role": "assistant", "content": "fox"}]
    made = one(dataset(format="chat"), {"messages": messages}, tokenizer)
    assert made.ids == [*ids("the\n"), *ids("fox"), EOS]
    assert made.trained[-1]
    assert prompt_ids(tokenizer, "the\n", chat=True) == ids("the\n")


def test_examples_together_are_the_same_as_each_alone() -> None:
    config = dataset(format="prompt-completion")
    rows = [
        {"prompt": prompt, "completion": completion}
        for prompt in ("the quick", "", "<s>the", "<s>", " ")
        for completion in ("fox", "</s>", "<s>how many", "é")
    ]
    for tokenizer in (TOKENIZER, PLAIN):
        together = several(config, rows, tokenizer)
        assert together == [one(config, row, tokenizer) for row in rows]
        for row, made in zip(rows, together, strict=True):
            prompt = prompt_ids(tokenizer, row["prompt"]) if row["prompt"] else []
            completion = prompt_ids(tokenizer, row["completion"]) if not prompt else ids(row["completion"])
            assert made.ids == [*prompt, *completion, EOS]
            assert sum(made.trained) == len(made.ids) - max(len(prompt), 1)
    assert several(config, []) == []


def test_padding_falls_back_to_eos() -> None:
    assert TOKENIZER.pad_token_id is None
    assert pad_id(TOKENIZER) == EOS


def test_a_tokenizers_own_truncation_and_padding_are_off() -> None:
    tokenizer: Any = make()
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=50)
    assert encode(tokenizer.backend_tokenizer, ["the quick brown fox"]) == [ids("the quick brown fox")]


def chunk_of(tmp_path: Path, text: bytes, **values: Any) -> TokenizedChunk:
    (tmp_path / "rows.jsonl").write_bytes(text)
    (only,) = chunks(tmp_path)
    return tokenize_chunk(tmp_path, only, dataset(**({"format": "text"} | values)), Encoder.of(TOKENIZER))


def test_every_row_is_accounted_for_with_its_line(tmp_path: Path) -> None:
    long = '{"text": "' + "the quick " * 40 + '"}\n'
    made = chunk_of(
        tmp_path,
        b'{"text": "fox"}\n\n{"text": ""}\n{"text": "\xff"}\nnot json\n[1]\n' + long.encode() + b'{"text": "the"}',
    )
    assert [(row.where, row.reason) for row in made.counts.listed] == [
        ("rows.jsonl:3", "empty completion"),
        ("rows.jsonl:4", "invalid UTF-8"),
        ("rows.jsonl:5", "invalid JSON"),
        ("rows.jsonl:6", "not a JSON object"),
        ("rows.jsonl:7", "longer than max_length"),
    ]
    assert (made.counts.rows_read, len(made.tokens), made.counts.bad.total(), made.counts.truncated) == (7, 2, 5, 0)
    assert made.origins[:, 0].tolist() == [0, 6]
    assert made.tokens.ids.tolist() == [BOS, *ids("fox"), EOS, BOS, *ids("the"), EOS]
    assert made.tokens.ids.dtype == np.int32


def test_truncation_cuts_the_end_and_counts(tmp_path: Path) -> None:
    long = '{"text": "' + "the quick " * 40 + '"}\n'
    made = chunk_of(tmp_path, long.encode(), overlong="truncate")
    assert made.tokens.lengths.tolist() == [64]
    assert made.tokens.ids.tolist() == [BOS, *ids("the quick " * 40)][:64]
    assert (made.counts.truncated, made.counts.bad.total(), made.counts.emptied) == (1, 0, 0)


def test_a_prompt_that_fills_the_row_leaves_no_example(tmp_path: Path) -> None:
    row = '{"prompt": "' + "the quick " * 40 + '", "completion": "fox"}\n'
    made = chunk_of(tmp_path, row.encode(), overlong="truncate", format="prompt-completion")
    assert (len(made.tokens), made.counts.emptied, made.counts.truncated, made.counts.bad.total()) == (0, 1, 0, 0)


def test_wrapped_keeps_long_examples_whole(tmp_path: Path) -> None:
    long = '{"text": "' + "the quick " * 40 + '"}\n'
    made = chunk_of(tmp_path, long.encode(), packing="wrapped")
    assert made.tokens.ids.tolist() == [BOS, *ids("the quick " * 40), EOS]
    assert made.counts.bad.total() == 0
