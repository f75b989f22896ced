"""What stage dataset compares: contexts that differ from a server's prompts, and masks that are wrong, are found."""

from typing import Any

import numpy as np
import pytest

from benchmarks.conversations import templates
from hyperpod_ft.config.sections.inputs import Dataset
from hyperpod_ft.data.context_check import check
from hyperpod_ft.data.encoder import Encoder
from hyperpod_ft.data.reading import RawRow
from hyperpod_ft.data.text import formats
from hyperpod_ft.data.tokenization import separated, tokenize
from hyperpod_ft.data.tokens import Tokens
from hyperpod_ft.errors import UserError
from tests.unit.tiny_tokenizer import CHATML, END, make

ROW = {
    "messages": [
        {"role": "user", "content": "How many?"},
        {"role": "assistant", "content": "Four."},
        {"role": "user", "content": "And then?"},
        {"role": "assistant", "content": "The end."},
    ]
}


def prepared(template: str, **settings: Any) -> tuple[Dataset, Encoder, list[Any], list[Tokens]]:
    tokenizer: Any = make(template)
    dataset, encoder = Dataset(source="./rows.jsonl", format="chat", **settings), Encoder.of(tokenizer)
    (made,) = separated([formats.examples(dataset, ROW, tokenizer)], encoder)
    examples = [documents[0] for documents in made]
    return dataset, encoder, examples, [tokenize([example], dataset, encoder) for example in examples]


def compared(template: str, change: Any = lambda ids, trained: None, **settings: Any) -> int:
    dataset, encoder, examples, tokens = prepared(template, **settings)
    assert encoder.tokenizer is not None
    turns = 0
    for example, made in zip(examples, tokens, strict=True):
        ids, trained = made.ids.copy(), made.trained.copy()
        change(ids, trained)
        turns += check(RawRow("rows.jsonl:1", ROW), example, dataset, encoder.tokenizer, ids, trained)
    return turns


@pytest.mark.parametrize("template", [CHATML, templates()["qwen3"], templates()["llama3_1"], templates()["gptoss"]])
@pytest.mark.parametrize("settings", [{}, {"train_on": "last_turn"}, {"loss_on": "all"}, {"reasoning": "drop"}])
def test_sound_examples_raise_no_alarm(template: str, settings: dict[str, Any]) -> None:
    alone = "train_on" in settings or "loss_on" in settings
    assert compared(template, **settings) == (1 if alone else 2)


def test_planted_faults_are_found() -> None:
    dataset, _, _, (tokens,) = prepared(CHATML)
    first = int(np.flatnonzero(tokens.trained)[0])

    def other_token(ids: Any, _: Any) -> None:
        ids[first - 2] += 1

    def prompt_trained(_: Any, trained: Any) -> None:
        trained[first - 1] = True

    def answer_not_trained(_: Any, trained: Any) -> None:
        trained[first] = False

    for change, said in (
        (other_token, rf"rows\.jsonl:1: message 2: a server would read other tokens .* from token {first - 1}:"),
        (prompt_trained, "message 2: the last token of the prompt is trained"),
        (answer_not_trained, "message 2: the first token of the answer is not trained"),
    ):
        with pytest.raises(UserError, match=said):
            compared(CHATML, change)
    assert dataset.format == "chat"


def test_a_server_that_renders_otherwise_is_found() -> None:
    dataset, _, (example,), (tokens,) = prepared(CHATML)
    trimming: Any = make(CHATML.replace("message['content']", "message['content'] | replace('?', '')"))
    with pytest.raises(UserError, match="a server would read other tokens"):
        check(RawRow("rows.jsonl:1", ROW), example, dataset, trimming, tokens.ids, tokens.trained)


def test_turns_share_an_example_only_where_a_server_reads_the_same_tokens() -> None:
    # no special token between an answer and what follows: its last word and the next line may become one token
    joined = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}"
    joined += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    _, encoder, examples, tokens = prepared(joined)
    assert len(examples) == 2, "each ends where a server stops"
    assert [made.ids[-1] for made in tokens] == [encoder.eos] * 2
    _, encoder, examples, _ = prepared(CHATML)
    assert len(examples) == 1 and END in examples[0].segments[1].text
