"""Every format's text, and what makes a row unusable."""

from typing import Any

import pytest
from pydantic import ValidationError

from hyperpod_ft.config import run_file
from hyperpod_ft.config.sections.inputs import Dataset
from hyperpod_ft.data.text.example import Example, RowError, Segment
from hyperpod_ft.data.text.formats import examples, prompt_of
from hyperpod_ft.data.text.prompts import check_prompt
from hyperpod_ft.errors import UserError
from tests.unit.tiny_tokenizer import CHATML, CHATML_MARKED, make

TOKENIZER: Any = make()


def render(config: Dataset, row: dict[str, Any], tokenizer: Any) -> Example:
    ((found,),) = examples(config, row, tokenizer)
    return found


def dataset(**values: Any) -> Dataset:
    return Dataset(**({"source": "./rows.jsonl", "max_length": 64} | values))


def text_of(example: Example) -> str:
    return "".join(segment.text for segment in example.segments)


def trained_text(example: Example) -> list[str]:
    return [segment.text for segment in example.segments if segment.trained]


def test_dolly_leaves_an_empty_context_out() -> None:
    row = {"instruction": "Who?", "context": "A book.", "response": "She."}
    example = render(dataset(format="dolly"), row, TOKENIZER)
    assert example.prompt == "### Instruction\nWho?\n\n### Context\nA book.\n\n### Answer\n"
    assert example.completion == "She."
    assert example.segments == (Segment(example.prompt, False), Segment("She.", True))
    for empty in ({"context": ""}, {"context": None}, {"context": " \n"}):
        assert prompt_of(dataset(format="dolly"), row | empty, TOKENIZER) == "### Instruction\nWho?\n\n### Answer\n"


def test_alpaca_has_two_templates() -> None:
    row = {"instruction": "Add.", "input": "1 2", "output": "3"}
    example = render(dataset(format="alpaca"), row, TOKENIZER)
    assert example.prompt == (
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a"
        " response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n### Input:\n1 2\n\n"
        "### Response:\n"
    )
    assert example.completion == "3"
    without = render(dataset(format="alpaca"), row | {"input": ""}, TOKENIZER)
    assert without.prompt == (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request."
        "\n\n### Instruction:\nAdd.\n\n### Response:\n"
    )


def test_alpaca_does_not_read_braces_in_the_data_as_fields() -> None:
    row = {"instruction": "{input} {0.__class__}", "input": "", "output": "3"}
    assert "{input} {0.__class__}" in prompt_of(dataset(format="alpaca"), row, TOKENIZER)


def test_prompt_completion_is_verbatim() -> None:
    example = render(dataset(format="prompt-completion"), {"prompt": " a\n", "completion": " b "}, TOKENIZER)
    assert (example.prompt, example.completion) == (" a\n", " b ")


@pytest.mark.parametrize(
    ("text", "beginning"),
    [
        ("Once upon", "Once"),
        ("  a time\n", "  a"),
        ("吾輩は猫である", "吾輩は"),
        ("one two " * 100, ("one two " * 25)[:-1]),
        ("a        ", ""),
    ],
)
def test_all_of_a_text_is_trained_and_its_beginning_is_the_prompt_of_a_sample(text: str, beginning: str) -> None:
    example = render(dataset(format="text"), {"text": text}, TOKENIZER)
    assert example == Example(beginning, text.removeprefix(beginning), (Segment(text, True),))
    assert prompt_of(dataset(format="text"), {"text": "Once upon"}, TOKENIZER) == "Once upon"


def test_loss_on_all_trains_the_prompt() -> None:
    example = render(dataset(format="prompt-completion", loss_on="all"), {"prompt": "a", "completion": "b"}, TOKENIZER)
    assert [segment.trained for segment in example.segments] == [True, True]


def test_template_keeps_its_last_line_break() -> None:
    config = dataset(format="template", prompt_template="Q: {{ question }}\nA:\n", completion_template="{{ answer }}")
    example = render(config, {"question": "1+1", "answer": "2"}, TOKENIZER)
    assert (example.prompt, example.completion) == ("Q: 1+1\nA:\n", "2")


def test_the_recipe_for_sst2_writes_a_label_as_a_word() -> None:
    for part in run_file.load(run_file.find("gptj-6b-sst2-p4d")).dataset.parts:
        for label, word in ((1, " positive"), (0, " negative")):
            example = render(part.dataset, {"sentence": "a fine film ", "label": label, "idx": 7}, TOKENIZER)
            assert (example.prompt, example.completion) == ("a fine film\nSentiment:", word)


def test_template_does_not_read_the_data_as_a_template() -> None:
    config = dataset(format="template", prompt_template="{{ q }}", completion_template="{{ a }}")
    assert render(config, {"q": "{{ 1 + 1 }}", "a": "x"}, TOKENIZER).prompt == "{{ 1 + 1 }}"


@pytest.mark.parametrize(
    "escape",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ a.__init__.__globals__ }}",
        "{{ ''['__class__'] }}",
        "{{ ('x'|attr('__class__')) }}",
        "{{ '{0.__class__}'.format(a) }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ self.__init__.__globals__ }}",
        "{% for x in [].__class__.__base__.__subclasses__() %}{{ x }}{% endfor %}",
    ],
)
def test_templates_are_sandboxed(escape: str) -> None:
    config = dataset(format="template", prompt_template="q", completion_template="answer " + escape)
    with pytest.raises(UserError) as refused:
        render(config, {"a": "x"}, TOKENIZER)
    assert "\n" not in str(refused.value)


def test_templates_may_not_change_the_row_or_loop_for_ever() -> None:
    row = {"rows": ["a"]}
    config = dataset(format="template", completion_template="{{ rows.append('b') }}")
    with pytest.raises(UserError):
        render(config, row, TOKENIZER)
    assert row == {"rows": ["a"]}
    endless = dataset(format="template", completion_template="{% for i in range(999999999) %}{% endfor %}")
    with pytest.raises(RowError, match="Range too big"):
        render(endless, {}, TOKENIZER)


def test_template_syntax_error_names_the_key_and_line() -> None:
    with pytest.raises(ValidationError, match=r"completion_template: line 2: "):
        dataset(format="template", completion_template="one\n{% if %}")


def test_prompts_are_checked_without_a_tokenizer() -> None:
    config = dataset(format="template", prompt_template="{{ city }}?", completion_template="{{ size }}")
    check_prompt(config, {"city": "Bern"}, "generate.prompts.0")
    with pytest.raises(UserError, match=r"generate\.prompts\.0: .*'city' is undefined.*write it as a row of format"):
        check_prompt(config, {"instruction": "x"}, "generate.prompts.0")


@pytest.mark.parametrize(
    ("values", "row", "reason"),
    [
        ({"format": "dolly"}, {"instruction": "x"}, "missing field 'response'"),
        ({"format": "dolly"}, {"response": "x"}, "missing field 'instruction'"),
        ({"format": "dolly"}, {"instruction": " ", "response": "x"}, "field 'instruction' is empty"),
        ({"format": "dolly"}, {"instruction": "a", "response": " \n"}, "empty completion"),
        ({"format": "dolly"}, {"instruction": "a", "response": 3}, "field 'response' is not a string"),
        ({"format": "dolly"}, {"instruction": "a", "response": None}, "field 'response' is not a string"),
        (
            {"format": "dolly"},
            {"instruction": "a", "context": ["b"], "response": "c"},
            "field 'context' is not a string",
        ),
        ({"format": "alpaca"}, {"instruction": "a", "input": ""}, "missing field 'output'"),
        ({"format": "prompt-completion"}, {"completion": "c"}, "missing field 'prompt'"),
        ({"format": "text"}, {"text": ""}, "empty completion"),
        ({"format": "text"}, {"text": "lone \ud800 surrogate"}, "invalid UTF-8"),
        ({"format": "template", "completion_template": "{{ answer }}"}, {"other": "x"}, "undefined in template"),
        ({"format": "template", "completion_template": "{{ n / 0 }}"}, {"n": 1}, "template fails"),
        ({"format": "chat"}, {"messages": []}, "field 'messages' is not a list of messages"),
        (
            {"format": "chat"},
            {"messages": [{"role": "user"}]},
            "message whose content is neither a string nor a list of text parts",
        ),
        ({"format": "chat"}, {"messages": ["hi"]}, "message without a role"),
        (
            {"format": "chat"},
            {"messages": [{"role": "user", "content": "hi"}]},
            "no answer to learn",
        ),
        (
            {"format": "chat"},
            {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": " "}]},
            "empty completion",
        ),
    ],
)
def test_unusable_rows(values: dict[str, Any], row: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowError) as refused:
        render(dataset(**values), row, TOKENIZER)
    assert refused.value.reason == reason


TWO_TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "So long."},
]


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED])
def test_chat_trains_on_every_turn_of_the_assistant(template: str) -> None:
    tokenizer: Any = make(template)
    config = dataset(format="chat")
    example = render(config, {"messages": TWO_TURNS}, tokenizer)
    assert trained_text(example) == ["Hello!<|im_end|>", "So long.<|im_end|>"]
    assert text_of(example) == tokenizer.apply_chat_template(TWO_TURNS, tokenize=False).rstrip()
    assert example.completion == "So long."
    assert example.prompt == prompt_of(config, {"messages": TWO_TURNS}, tokenizer)
    assert example.prompt == prompt_of(config, {"messages": TWO_TURNS[:-1]}, tokenizer)
    assert example.prompt == tokenizer.apply_chat_template(TWO_TURNS[:-1], tokenize=False, add_generation_prompt=True)
    whole = render(dataset(format="chat", loss_on="all"), {"messages": TWO_TURNS}, tokenizer)
    assert "".join(trained_text(whole)) == text_of(example)


def test_chat_without_a_template_is_one_line() -> None:
    tokenizer: Any = make(None)
    with pytest.raises(UserError, match="tokenizer has no chat template; use"):
        render(dataset(format="chat"), {"messages": TWO_TURNS}, tokenizer)


def test_chat_template_whose_answers_do_not_follow_its_prompts_is_refused() -> None:
    rewriting = "{% for m in messages %}[{{ m['role'] }}]{% if loop.last %}{{ m['content'] }}{% endif %}{% endfor %}"
    tokenizer: Any = make(rewriting)
    with pytest.raises(RowError, match=r"begins an answer differently than it asks for one: message 3: 'Hi', but"):
        render(dataset(format="chat"), {"messages": TWO_TURNS}, tokenizer)


def test_a_chat_template_may_refuse_a_row() -> None:
    strict: Any = make("{% if messages[0]['role'] != 'user' %}{{ raise_exception('start with user') }}{% endif %}")
    with pytest.raises(RowError, match="chat template rejects the messages: start with user"):
        render(dataset(format="chat"), {"messages": TWO_TURNS}, strict)


def test_a_chat_template_that_fails_on_a_row_makes_it_a_bad_one() -> None:
    failing = make(chat_template="{{ messages[0]['content'] + 1 }}")
    with pytest.raises(RowError, match="chat template fails: TypeError: "):
        render(dataset(format="chat"), {"messages": TWO_TURNS}, failing)
