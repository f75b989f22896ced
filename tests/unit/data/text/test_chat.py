"""Conversations in today's chat templates: every context is a server's prompt, and what is trained follows it."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from benchmarks import conversations
from benchmarks.conversations import KINDS, PLACE, SPECIAL, TOOLS, answer, call, given, templates, user
from hyperpod_ft.config.sections.inputs import Dataset
from hyperpod_ft.data.text import chat, conversation, rendering
from hyperpod_ft.data.text.conversation import Conversation
from hyperpod_ft.data.text.example import Example, RowError
from hyperpod_ft.data.text.formats import examples
from hyperpod_ft.data.text.rendering import ChatRenderer
from hyperpod_ft.data.text.turns import examples_of, turns
from tests.unit.tiny_tokenizer import CHATML, make

# Kinds that a template refuses in its own words, or does not write at all.
NO_TOOLS = {"tool call", "arguments as text, no content", "tool call after reasoning"}
WITHOUT_TOOLS = {
    *("cohere", "cohere2", "gemma", "gemma3", "idefics3", "lfm2", "llama3", "llava_next", "phi3", "phi3_5"),
    *("qwen2_5_vl", "smolvlm"),
}
REFUSED = {"gemma": {"system", "developer"}}
# Templates that ask for reasoning and then do not write it before an answer without any, marked as if they did not ask,
# and other marks that leave out what the template itself writes.
UNREASONED = {"one turn", "system", "developer", "two turns", "parts", "tool call", "arguments as text, no content"}
MARKED_OTHERWISE: dict[str, set[str]] = {
    "deepseek_r1_distill": set(KINDS) - {"reasoning in the content"},
    "deepseekv3": set(KINDS),
    "diffusion_gemma": NO_TOOLS,
    "gptoss": {"tool call after reasoning"},
    **{f"nemotron_3{size}": UNREASONED for size in ("_5_lightning", "_nano", "_super", "_ultra")},
    "qwen3_5_nothink": {"reasoning", "reasoning in the content", "tool call after reasoning"},
}
TEMPLATES = templates()


def as_served(renderer: ChatRenderer, given: Conversation, place: int) -> str:
    """What transformers renders for a request, by itself."""
    from transformers.utils.chat_template_utils import render_jinja_template

    (text,), _ = render_jinja_template(  # type: ignore[misc]
        [renderer.presentation.messages(given.messages[:place])],
        tools=list(given.tools) if given.tools else None,
        chat_template=renderer.template,
        add_generation_prompt=True,
        **SPECIAL,
        **given.template_kwargs,
    )
    return str(text)


@pytest.mark.parametrize("name", sorted(TEMPLATES))
@pytest.mark.parametrize("kind", KINDS)
def test_every_turn_is_trained_after_what_a_server_reads(kind: str, name: str) -> None:
    renderer, one = ChatRenderer(TEMPLATES[name], SPECIAL), given(kind)
    model = name.removesuffix("_training")
    refused = REFUSED.get(model, set()) | (NO_TOOLS if model in WITHOUT_TOOLS else set())
    if renderer.marks_turns and not name.startswith("lfm2"):
        refused = refused | MARKED_OTHERWISE.get(model, set())
    if kind in refused:
        with pytest.raises(RowError, match=r"rejects the messages|omits the tool calls|generation"):
            turns(one, renderer)
        return
    found = turns(one, renderer)
    assert [turn.place for turn in found] == [
        place for place, message in enumerate(one.messages) if message["role"] == "assistant"
    ]
    for turn in found:
        assert turn.context == as_served(renderer, one, turn.place)
        message = one.messages[turn.place]
        assert message["content"].split("\n")[-1] in turn.target and "Q" not in turn.target
        for function in message.get("tool_calls", ()):
            assert "get_weather" in turn.target and "Bern" in turn.target, function
        reasoning = {2: "WHY1", 4: "WHY2"}.get(2 * (1 + [other.place for other in found].index(turn.place)), "")
        if "reasoning" in kind and kind != "reasoning off" and not turn.loses_reasoning:
            assert reasoning in turn.target


@pytest.mark.parametrize("name", ["qwen3", "gptoss", "nemotron_3_nano", "deepseek_r1_distill", "qwen3_6", "glm4moe"])
def test_templates_that_drop_earlier_reasoning_make_an_example_of_each_turn(name: str) -> None:
    renderer = ChatRenderer(TEMPLATES[name], SPECIAL)
    first, second = turns(given("reasoning"), renderer)
    assert examples_of([first, second]) == [[first], [second]]
    assert "WHY1" in first.target and "WHY1" not in second.context and "WHY2" in second.target


@pytest.mark.parametrize("name", ["llama3_1", "qwen2_5", "qwen3_instruct_2507", "gemma3", "qwen3_8"])
def test_turns_whose_contexts_nest_stay_in_one_example(name: str) -> None:
    renderer = ChatRenderer(TEMPLATES[name], SPECIAL)
    found = turns(given("two turns"), renderer)
    assert examples_of(found) == [found]


TWO = [user("Hi"), answer("Hello!"), user("Bye"), answer("So long.")]


def made(row: Mapping[str, Any], template: str = CHATML, **settings: Any) -> list[Example]:
    tokenizer: Any = make(template)
    dataset = Dataset(source="./rows.jsonl", format="chat", **settings)
    return [documents[0] for documents in examples(dataset, row, tokenizer)]


def learned(row: Mapping[str, Any], template: str = CHATML, **settings: Any) -> list[str]:
    return [
        segment.text[segment.untrained :]
        for example in made(row, template, **settings)
        for segment in example.segments
        if segment.trained
    ]


SHAREGPT = [
    {"from": "human", "value": "Hi"},
    {"from": "gpt", "value": "Hello!"},
    {"from": "human", "value": "Bye"},
    {"from": "gpt", "value": "So long."},
]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": TWO},
        {"conversations": SHAREGPT},
        {"conversations": SHAREGPT, "system": "", "tools": "[]"},
        {"messages": [{**message, "weight": None, "tool_calls": None, "reasoning_content": None} for message in TWO]},
        {"messages": [{**message, "weight": 1} for message in TWO]},
        {"messages": [*TWO, user("One more")]},
    ],
)
def test_shapes_of_one_conversation(row: Mapping[str, Any]) -> None:
    (example,) = made(row)
    (expected,) = made({"messages": TWO})
    assert example == expected


def test_only_what_follows_a_prompt_of_messages_is_trained() -> None:
    assert learned({"prompt": TWO[:3], "completion": TWO[3:]}) == ["So long.<|im_end|>"]


def test_a_weight_of_zero_makes_an_answer_context() -> None:
    for key in ("weight", "train", "training"):
        assert learned({"messages": [TWO[0], {**TWO[1], key: 0}, *TWO[2:]]}) == ["So long.<|im_end|>"]
    with pytest.raises(RowError, match=r"weight of a message is neither 0 nor 1: message 2: 0\.5"):
        made({"messages": [TWO[0], {**TWO[1], "weight": 0.5}]})


def test_the_last_turn_alone() -> None:
    assert learned({"messages": TWO}, train_on="last_turn") == ["So long.<|im_end|>"]


def test_a_greeting_is_context() -> None:
    assert learned({"messages": [answer("Welcome."), *TWO]}) == ["Hello!<|im_end|>", "So long.<|im_end|>"]
    with pytest.raises(RowError, match="no answer to learn"):
        made({"messages": [answer("Welcome.")]})


def test_a_system_column_is_the_first_message() -> None:
    (example,) = made({"conversations": SHAREGPT, "system": "Be brief."})
    assert example.segments[0].text.startswith("<s><|im_start|>system\nBe brief.<|im_end|>")
    (example,) = made({"conversations": SHAREGPT, "system": "Be brief."}, ignored_columns=("system",))
    assert "Be brief" not in example.segments[0].text


def test_calls_of_sharegpt() -> None:
    rows = [
        {"from": "human", "value": "Q1"},
        {"from": "function_call", "value": json.dumps({"name": "get_weather", "arguments": PLACE})},
        {"from": "observation", "value": "3 degrees"},
        {"from": "gpt", "value": "ANS2"},
    ]
    found = conversation.of_row({"conversations": rows, "tools": json.dumps([TOOLS[0]["function"]])})
    assert found.tools == TOOLS
    assert [message["role"] for message in found.messages] == ["user", "assistant", "tool", "assistant"]
    assert found.messages[1]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": PLACE}


QWEN = TEMPLATES["qwen3"]
THINKING = {"messages": [user("Q1"), answer("ANS1", reasoning_content="WHY1")]}


def test_what_becomes_of_reasoning() -> None:
    assert learned(THINKING, QWEN) == ["<think>\nWHY1\n</think>\n\nANS1<|im_end|>"]
    assert learned(THINKING, QWEN, reasoning="context") == ["\n</think>\n\nANS1<|im_end|>"]
    for reasoned in (THINKING["messages"][1], answer("<think>\nWHY1\n</think>\n\nANS1")):
        row = {"messages": [user("Q1"), reasoned]}
        assert learned(row, QWEN, reasoning="drop") == ["<think>\n\n</think>\n\nANS1<|im_end|>"]
    (plain,) = made(THINKING, CHATML)
    assert plain.loses_reasoning == 1, "this template does not write it"


def test_settings_of_the_run_and_of_the_row() -> None:
    (example,) = made({"messages": TWO[:2]}, QWEN, chat_template_kwargs={"enable_thinking": False})
    assert example.prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert learned({"messages": TWO[:2]}, QWEN, chat_template_kwargs={"enable_thinking": False}) == ["Hello!<|im_end|>"]
    row = {"messages": TWO[:2], "chat_template_kwargs": '{"enable_thinking": true}'}
    (example,) = made(row, QWEN, chat_template_kwargs={"enable_thinking": False})
    assert example.prompt.endswith("<|im_start|>assistant\n")
    with pytest.raises(RowError, match="chat_template_kwargs with a name of the kit's own: tools"):
        made({"messages": TWO, "chat_template_kwargs": {"tools": []}})


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"messages": [user([{"type": "image", "url": "x.png"}])]}, "part of type 'image', which is not text"),
        ({"messages": [user({"text": "x"})]}, "neither a string nor a list of text parts"),
        ({"messages": [user("x"), answer(None)]}, "neither a string nor a list of text parts"),
        ({"messages": [user("x"), answer("", tool_calls=[{"function": {}}])]}, "tool call without a name"),
        ({"messages": [user("x"), answer("", tool_calls=call("{"))]}, "invalid JSON in a message: message 2"),
        ({"messages": [user("x"), answer("", tool_calls=call("[1]"))]}, "arguments of a tool call that are not an ob"),
        ({"messages": TWO, "tools": "{"}, "invalid JSON in a message: tools"),
        ({"messages": TWO, "tools": [{"type": "function"}]}, "tool without a name"),
        ({"messages": TWO, "tools": [{"type": "function", "name": "f", "function": "x"}]}, "tool without a name"),
        ({"messages": [user("x"), answer("", tool_calls=call('{"x": NaN}'))]}, "NaN is not JSON"),
        ({"messages": []}, "field 'messages' is not a list of messages"),
        ({"messages": TWO, "chat_template_kwargs": [1]}, "chat_template_kwargs that are not an object"),
        ({"conversations": [{"from": "martian", "value": "x"}]}, "message from an unknown role: message 1: 'martian'"),
        ({"messages": [user("x"), answer("y", reasoning_content=["z"])]}, "reasoning that is not a string"),
        ({"text": "x"}, "missing field 'messages'"),
    ],
)
def test_unusable_conversations(row: Mapping[str, Any], problem: str) -> None:
    with pytest.raises(RowError, match=problem):
        made(row)


MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("planted", "problem"),
    [
        # the end of the turn is not marked
        (
            MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>"),
            "leaves out a part of an answer: message 2: '<|im_end|>'",
        ),
        # everything is marked
        (
            "{% generation %}"
            + MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
            + "{% endgeneration %}",
            "marks a part of a request: message 2: 'Hi'",
        ),
        # an answer is trimmed where it is not asked for
        (
            MARKED.replace("{% generation %}{{ m.content", "{% generation %}{{ m.content[1:]"),
            "omits a part of the answer",
        ),
        # nothing is marked
        (
            "{% if false %}{% generation %}{% endgeneration %}{% endif %}"
            + MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", ""),
            "leaves out a part of an answer",
        ),
        # answers begin otherwise than they are asked for
        (MARKED.replace("<|im_start|>assistant\n{% endif", "<|im_start|>model\n{% endif"), "differently than it asks"),
    ],
)
def test_marks_and_templates_that_disagree_are_refused(planted: str, problem: str) -> None:
    assert made({"messages": TWO}, MARKED)
    with pytest.raises(RowError, match=problem):
        made({"messages": TWO}, planted)


def test_a_template_is_asked_once_how_it_wants_messages() -> None:
    found = {name: ChatRenderer(text, SPECIAL).presentation for name, text in TEMPLATES.items()}
    assert found["smolvlm"].parts and not found["qwen3"].parts
    assert found["deepseekv3"].arguments_as_text and not found["qwen3"].arguments_as_text
    assert found["qwen3"].developer_as_system and not found["gptoss"].developer_as_system
    assert [found[name].reasoning for name in ("gptoss", "qwen3", "llama3")] == ["thinking", "reasoning_content", None]
    tokenizer: Any = make(QWEN)
    assert rendering.of(tokenizer, Conversation(())) is rendering.of(tokenizer, Conversation(()))


def test_the_table_in_the_docs_is_what_becomes_of_each_kind() -> None:
    text = conversations.DOCUMENT.read_text(encoding="utf-8")
    assert text == conversations.document(text), "run: python -m benchmarks.conversations"


@pytest.mark.parametrize("name", ["deepseek_r1_distill", "deepseekv3", "qwen3", "nemotron_3_nano", "glm4moe"])
@pytest.mark.parametrize("asked", ["", "\n", "a"])
def test_an_answer_is_trained_whole_whatever_was_asked(name: str, asked: str) -> None:
    (trained,) = learned({"messages": [user(asked), answer("line one\nline two\nline three")]}, TEMPLATES[name])
    assert "line one\nline two\nline three" in trained and "assistant" not in trained.lower()


@pytest.mark.parametrize("name", ["qwen3", "glm4moe", "qwen3_6", "deepseekv3"])
@pytest.mark.parametrize("said", ["A tag <think> is closed by </think> here.\nEnd.", "First </think> then.\nEnd."])
def test_markup_within_an_answer_loses_none_of_it(name: str, said: str) -> None:
    try:
        (trained,) = learned({"messages": [user("Q"), answer(said)]}, TEMPLATES[name])
    except RowError as error:
        assert error.reason == "chat template omits a part of the answer"
    else:
        assert said in trained


def test_what_a_template_leaves_out_of_the_context_is_a_bad_row() -> None:
    with pytest.raises(RowError, match="chat template omits the tools"):
        made({"messages": TWO, "tools": TOOLS}, TEMPLATES["llama3"])
    assert made({"messages": TWO, "tools": TOOLS}, TEMPLATES["llama3"], ignored_columns=("tools",))
    notes = [user("Q1"), {"role": "narrator", "content": "Later."}, answer("ANS1")]
    with pytest.raises(RowError, match="chat template omits a message: message 2, of role narrator"):
        made({"messages": notes}, TEMPLATES["qwen3"])
    assert learned({"messages": [{"role": "human", "content": "Hi"}, {"role": "gpt", "content": "Yo"}]}, QWEN)


def test_other_names_of_the_same() -> None:
    function = {"name": "get_weather", "arguments": json.dumps(PLACE)}
    for row in (
        [user("Q1"), answer("", function_call=function)],
        [user("Q1"), answer(None, tool_calls=[{"function": {**function, "arguments": None, "parameters": PLACE}}])],
    ):
        (trained,) = learned({"messages": row, "tools": TOOLS}, QWEN)
        assert '"arguments": {"place": "Bern", "days": 2}' in trained
    (trained,) = learned({"messages": [user("Q"), answer("A", reasoning_content="", reasoning="WHY")]}, QWEN)
    assert "WHY" in trained
    assert made({"messages": None, "conversations": SHAREGPT}) == made({"messages": TWO})
    with pytest.raises(RowError, match="neither a string nor a list of text parts"):
        made({"conversations": SHAREGPT, "system": {"text": "x"}})


def test_an_empty_answer_is_refused_only_where_it_would_be_trained() -> None:
    messages = [user("Hi"), answer(""), user("Bye"), answer("So long.")]
    with pytest.raises(RowError, match="empty completion: message 2"):
        made({"messages": messages})
    assert learned({"messages": messages}, train_on="last_turn") == ["So long.<|im_end|>"]
    tokenizer: Any = make(CHATML)
    assert chat.prompt(messages[:3], tokenizer).endswith("Bye<|im_end|>\n<|im_start|>assistant\n")


def test_everything_is_trained_or_an_answer_is_not() -> None:
    with pytest.raises(RowError, match="an answer of weight 0, where"):
        made({"messages": [TWO[0], {**TWO[1], "weight": 0}, *TWO[2:]]}, loss_on="all")


HEADED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}<|im_start|>assistant\n"
    "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("asked", ["a", "s", "assistant"])
def test_a_short_request_is_not_looked_for_in_the_generation_prompt(asked: str) -> None:
    assert learned({"messages": [user(asked), answer("Yes")]}, HEADED) == ["Yes<|im_end|>"]
