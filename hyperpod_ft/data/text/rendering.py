"""The tokenizer's chat template as a function of messages.

Templates differ in what they read: text as a string or as a list of parts, no text beside tool calls as "" or null, the
arguments of tool calls as an object or as text, reasoning under one of three names or not at all, instructions of the
developer as such or only as those of the system. A template that does not read what it is given mostly leaves it out
without an error. So each is asked once, with marked texts, how it wants its messages.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property, lru_cache
from itertools import product
from typing import Any

from hyperpod_ft.data.text.conversation import IMAGE, REASONING, Conversation
from hyperpod_ft.data.text.example import RowError
from hyperpod_ft.data.tokenizer import Tokenizer
from hyperpod_ft.errors import UserError

_PROBE = "Zebra7"
_MARKS_TURNS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_RESERVED = frozenset(
    {"messages", "conversations", "tools", "documents", "chat_template", "add_generation_prompt"}
    | {"continue_final_message", "return_assistant_tokens_mask", "bos_token", "eos_token", "pad_token", "unk_token"}
)
Spans = list[tuple[int, int]]
_fixed: dict[str, Any] = {}  # what templates find beside messages


def fix_date() -> None:
    """Give all rows of a program one date: some templates write today's, such as those of Llama 3.2 and gpt-oss."""
    _fixed["strftime_now"] = datetime.now().strftime


@dataclass(frozen=True)
class Presentation:
    """How a template wants its messages; `reasoning` is the key that it reads, None if it reads none."""

    parts: bool = False
    null_content: bool = False  # beside tool calls
    arguments_as_text: bool = False
    developer_as_system: bool = False
    reasoning: str | None = None

    def messages(self, given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Messages of a Conversation as the template takes them."""
        return [self._message(message) for message in given]

    def _message(self, given: Mapping[str, Any]) -> dict[str, Any]:
        message = dict(given)
        if self.developer_as_system and message["role"] == "developer":
            message["role"] = "system"
        if REASONING[0] in message and self.reasoning != REASONING[0]:
            text = message.pop(REASONING[0])
            message |= {self.reasoning: text} if self.reasoning else {}
        calls = message.get("tool_calls")
        if calls and self.arguments_as_text:
            message["tool_calls"] = [_with_text_arguments(call) for call in calls]
        if calls and self.null_content and not message["content"]:
            message["content"] = None
        elif self.parts or IMAGE in message["content"]:
            message["content"] = _parts(message["content"])
        return message


def _parts(content: str) -> list[dict[str, Any]]:
    texts: list[list[dict[str, Any]]] = [
        [{"type": "text", "text": text}] if text or IMAGE not in content else [] for text in content.split(IMAGE)
    ]
    return [part for place, text in enumerate(texts) for part in ([{"type": "image"}] if place else []) + text]


def _with_text_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def of(tokenizer: Tokenizer, conversation: Conversation) -> "ChatRenderer":
    """The renderer of a tokenizer for a conversation; made once. Some have a template of its own for those with tools.

    Raises UserError if it has no chat template.
    """
    try:
        template = tokenizer.get_chat_template(tools=conversation.tools)
    except ValueError as error:
        raise UserError(
            "dataset.format: the rows are chat messages, and the model's tokenizer has no chat template",
            "use an instruction-tuned model's tokenizer, or format template",
        ) from error
    special = tuple((name, text) for name, text in tokenizer.special_tokens_map.items() if isinstance(text, str))
    return _renderer(template, special, tuple(tokenizer.all_special_tokens))


@lru_cache(maxsize=8)
def _renderer(template: str, special: tuple[tuple[str, str], ...], ends: tuple[str, ...]) -> "ChatRenderer":
    return ChatRenderer(template, dict(special), ends)


@dataclass(frozen=True)
class ChatRenderer:
    """A chat template with the tokenizer's special tokens: those that it can name, and all that may end a turn."""

    template: str
    special_tokens: Mapping[str, str]
    ends: tuple[str, ...] = ()

    @cached_property
    def marks_turns(self) -> bool:
        """Whether the template marks the assistant's turns with {% generation %}, as transformers decides it."""
        return bool(_MARKS_TURNS.search(self.template))

    def end(self, turn: str) -> str:
        """The special token that ends a turn; empty if none does."""
        return next(filter(turn.endswith, self.ends), "")

    def text(self, messages: Sequence[Mapping[str, Any]], conversation: Conversation, *, ask: bool = False) -> str:
        """`messages` as text, with the tools and settings of `conversation`; `ask`: an answer follows.

        Raises RowError.
        """
        return self._apply(messages, conversation, add_generation_prompt=ask)[0]

    def marked(self, messages: Sequence[Mapping[str, Any]], conversation: Conversation) -> tuple[str, Spans]:
        """The text, and where the template says that the assistant's turns are. Raises RowError."""
        return self._apply(messages, conversation, return_assistant_tokens_mask=True)

    def _apply(
        self, messages: Sequence[Mapping[str, Any]], conversation: Conversation, **options: bool
    ) -> tuple[str, Spans]:
        # transformers' renderer: it has the Jinja environment and finds the spans that {% generation %} marks
        from jinja2 import TemplateError  # noqa: PLC0415 - only chats need these two
        from transformers.utils import chat_template_utils  # noqa: PLC0415

        if reserved := sorted(_RESERVED.intersection(conversation.template_kwargs)):
            raise RowError("chat_template_kwargs with a name of the kit's own", reserved[0])
        renderer: Any = chat_template_utils.render_jinja_template  # annotated `-> str`, returns two lists
        try:
            texts, spans = renderer(
                [list(messages)],
                tools=conversation.tools,
                chat_template=self.template,
                **options,
                **self.special_tokens,
                **_fixed,
                **conversation.template_kwargs,
            )
        except TemplateError as error:  # a template's own raise_exception("roles must alternate")
            raise RowError("chat template rejects the messages", str(error)) from error
        except Exception as error:  # the template's expressions may raise anything
            raise RowError("chat template fails", f"{type(error).__name__}: {error}") from error
        return str(texts[0]), spans[0] if spans else []

    @cached_property
    def presentation(self) -> Presentation:
        """How this template wants its messages, found by asking it."""
        user, found = {"role": "user", "content": "?"}, Presentation()
        found = self._first_that_shows(
            [replace(found, parts=parts) for parts in (False, True)], [{**user, "content": _PROBE}]
        )
        found = self._first_that_shows(
            [replace(found, developer_as_system=choice) for choice in (False, True)],
            [{"role": "developer", "content": _PROBE}, user],
        )
        shapes = product((False, True), (False, True))
        call = {"type": "function", "id": "call00001", "function": {"name": "probe", "arguments": {"key": _PROBE}}}
        calling = {"role": "assistant", "content": "", "tool_calls": [call]}
        found = self._first_that_shows(
            [replace(found, null_content=null, arguments_as_text=text) for text, null in shapes], [user, calling]
        )
        names = [replace(found, reasoning=name) for name in REASONING]
        for answer in ({"role": "assistant", "content": "."}, calling):
            thinking: list[Mapping[str, Any]] = [user, {**answer, REASONING[0]: _PROBE * 2}]
            if any(self._shows(one, thinking, _PROBE * 2) for one in names):
                return self._first_that_shows(names, thinking, _PROBE * 2)
        return found

    def _first_that_shows(
        self, choices: Sequence[Presentation], given: Sequence[Mapping[str, Any]], probe: str = _PROBE
    ) -> Presentation:
        """The first of the choices whose text has the probe; the first one if none has."""
        return next((choice for choice in choices if self._shows(choice, given, probe)), choices[0])

    def _shows(self, choice: Presentation, given: Sequence[Mapping[str, Any]], probe: str) -> bool:
        try:
            return probe in self.text(choice.messages(given), Conversation(()))
        except RowError:
            return False
