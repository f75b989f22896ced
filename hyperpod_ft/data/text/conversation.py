"""A raw row or a request as a conversation: the shapes that users have, made one.

OpenAI's messages (`role`, `content`, `tool_calls`), its fine-tuning rows (`weight`), ShareGPT's (`from`, `value`), and
a prompt and a completion that are messages. What comes of them has OpenAI's shape, with text as strings and the
arguments of tool calls as objects.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from hyperpod_ft.config import prompt_images
from hyperpod_ft.data.text.example import RowError

# Names of the text that a model thinks before it answers: Qwen's and DeepSeek's, OpenAI's newer one, gpt-oss's.
REASONING = ("reasoning_content", "reasoning", "thinking")
BESIDE_MESSAGES = ("system", "tools", "chat_template_kwargs")  # columns that belong to a row's messages
IMAGE = "\ufdd0"  # an image in a message's text: a code point that Unicode will never assign to a character
_OF_LLAVA = "<image>"
_NAME = 200  # characters kept of an image's name, at its end
_TEXT_PARTS = ("text", "input_text", "output_text")
_OF_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "function_call"), "assistant"),
    **dict.fromkeys(("observation", "tool", "function", "function_response"), "tool"),
    **{role: role for role in ("system", "developer")},
}
_TRAINED_KEYS = ("weight", "train", "training")  # OpenAI's; axolotl's


@dataclass(frozen=True)
class Conversation:
    """`untrained`: the places of assistant messages that are context only.

    `images`: the content of their files, in the order in which `IMAGE` stands for them in the messages; `image_names`:
    what the row calls these files, empty for those that it contains.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: Sequence[Mapping[str, Any]] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    untrained: frozenset[int] = frozenset()
    images: tuple[bytes, ...] = ()
    image_names: tuple[str, ...] = ()

    def images_before(self, place: int) -> tuple[bytes, ...]:
        """Those of the messages before a place."""
        return self.images[: self._count_before(place)]

    def image_names_before(self, place: int) -> tuple[str, ...]:
        return self.image_names[: self._count_before(place)]

    def _count_before(self, place: int) -> int:
        return sum(message["content"].count(IMAGE) for message in self.messages[:place])


ReadImage = Callable[[Any], bytes]
"""The content of the file that a row or a request names, or has itself. Raises RowError."""


def of_row(row: Mapping[str, Any], read_image: ReadImage | None = None) -> Conversation:
    """The conversation of a raw row of format `chat`; without `read_image`, it has no images. Raises RowError."""
    before = 0
    if row.get("messages") is None and isinstance(row.get("completion"), list):
        prompt = _listed(row, "prompt")
        given, before = [*prompt, *_listed(row, "completion")], len(prompt)
    else:
        given = _listed(row, "conversations" if row.get("messages") is None and "conversations" in row else "messages")
    if system := row.get("system"):
        given, before = [{"role": "system", "content": system}, *given], before + (before > 0)
    column: Any = next((row[name] for name in prompt_images.COLUMNS if row.get(name)), [])
    found = of_messages(
        given,
        tools=row.get("tools"),
        template_kwargs=row.get("chat_template_kwargs"),
        read_image=read_image,
        images=column if isinstance(column, list) else [column],
    )
    return replace(found, untrained=found.untrained.union(range(before)))


def of_messages(
    messages: Sequence[Any],
    *,
    tools: Any = None,
    template_kwargs: Any = None,
    read_image: ReadImage | None = None,
    images: Sequence[Any] = (),
) -> Conversation:
    """A conversation of messages as OpenAI's API takes them; `tools` may also be JSON text. Raises RowError.

    `images`: those of image parts that name none, in their order; without such parts, `_Images.placed` says where.
    """
    if not messages:
        raise RowError("no messages")
    messages = [_of_sharegpt(message, number) for number, message in enumerate(messages, 1)]
    untrained = frozenset(
        place for place, message in enumerate(messages) if isinstance(message, dict) and not _trained(message, place)
    )
    found = _Images(read_image, images) if read_image else None
    made = tuple(_message(message, number, found) for number, message in enumerate(messages, 1))
    if found:
        made = found.placed(made)
    for place, message in enumerate(made):
        if message["role"] == "assistant" and IMAGE in message["content"]:
            raise RowError("image in an answer", f"message {place + 1}")
    return Conversation(
        made,
        _tools(tools),
        _template_kwargs(template_kwargs),
        untrained,
        tuple(found.contents) if found else (),
        tuple(found.names) if found else (),
    )


class _Images:
    """The images of a conversation, collected while its messages are read."""

    def __init__(self, read: ReadImage, column: Sequence[Any]) -> None:
        self._read, self._column, self._taken = read, column, 0
        self.contents: list[bytes] = []
        self.names: list[str] = []

    def add(self, part: Mapping[str, Any]) -> None:
        """That of an image part."""
        given = next((part[key] for key in prompt_images.KEYS if part.get(key)), None)
        if given is None:
            if self._taken == len(self._column):
                raise RowError("more image parts than images", f"the row has {len(self._column)} images")
            given = self._column[self._taken]
            self._taken += 1
        of_openai = isinstance(given, dict) and isinstance(given.get("url"), str)
        self._append(given["url"] if of_openai else given)

    def placed(self, messages: tuple[Mapping[str, Any], ...]) -> tuple[Mapping[str, Any], ...]:
        """The messages with the images that no part stands for: where `<image>` is, or before the first question."""
        if self._taken == len(self._column):
            return messages
        first = next((place for place, message in enumerate(messages) if message["role"] == "user"), None)
        if self.contents or first is None:
            raise RowError("more images than image parts", f"the row has {len(self._column)} images")
        for given in self._column:
            self._append(given)
        written = sum(message["content"].count(_OF_LLAVA) for message in messages)
        if written not in (0, len(self._column)):
            raise RowError(f"another number of {_OF_LLAVA} than images", f"{written}, {len(self._column)} images")
        if written:
            return tuple({**one, "content": one["content"].replace(_OF_LLAVA, IMAGE)} for one in messages)
        asked = {**messages[first], "content": IMAGE * len(self._column) + messages[first]["content"]}
        return (*messages[:first], asked, *messages[first + 1 :])

    def _append(self, given: Any) -> None:
        self.contents.append(self._read(given))
        path = given.get("path") if isinstance(given, Mapping) else given
        self.names.append(path[-_NAME:] if isinstance(path, str) and not path.startswith("data:") else "")


def _listed(row: Mapping[str, Any], name: str) -> list[Any]:
    if name not in row:
        raise RowError(f"missing field {name!r}", f"the row has {', '.join(map(str, row)) or 'no fields'}")
    messages = row[name]
    if not isinstance(messages, list) or not messages:
        raise RowError(f"field {name!r} is not a list of messages")
    return messages


def _of_sharegpt(message: Any, number: int) -> Any:
    if not isinstance(message, dict) or message.get("from") is None:
        return message  # written with role and content, or an error for `_message`
    role, text = _OF_ROLES.get(str(message["from"])), message.get("value")
    if role is None:
        raise RowError("message from an unknown role", f"message {number}: {message['from']!r}")
    others = {key: value for key, value in message.items() if key not in ("from", "value")}
    if message["from"] == "function_call":
        calls = _json(text, f"message {number}: the function call")
        return {"role": role, "content": None, "tool_calls": calls if isinstance(calls, list) else [calls], **others}
    return {"role": role, "content": text, **others}


def _trained(message: Mapping[str, Any], place: int) -> bool:
    for key in _TRAINED_KEYS:
        value = message.get(key)
        if value is not None and value not in (0, 1):
            raise RowError(f"{key} of a message is neither 0 nor 1", f"message {place + 1}: {value!r}")
        if value is not None and not value:
            return False
    return True


def _message(given: Any, number: int, images: _Images | None) -> Mapping[str, Any]:
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise RowError("message without a role", f"message {number}")
    # parquet files have every key in every row, most of them null
    message = {key: value for key, value in given.items() if value is not None and key not in _TRAINED_KEYS}
    message["role"] = _OF_ROLES.get(message["role"], message["role"])
    reasoning = [message.pop(name) for name in REASONING if name in message]
    if any(not isinstance(text, str) for text in reasoning):
        raise RowError("reasoning that is not a string", f"message {number}")
    if thought := next((text for text in reasoning if text.strip()), ""):
        message[REASONING[0]] = thought
    calls = message.pop("tool_calls", None) or []
    if function := message.pop("function_call", None):  # OpenAI's older form
        calls = [function]
    if calls:
        if not isinstance(calls, list):
            raise RowError("tool_calls that are not a list", f"message {number}")
        message["tool_calls"] = [_tool_call(call, number) for call in calls]
    says_more = "tool_calls" in message or REASONING[0] in message
    message["content"] = _text(message.get("content"), number, images, may_be_missing=says_more)
    return message


def _text(content: Any, number: int, images: _Images | None, *, may_be_missing: bool) -> str:
    if isinstance(content, str):
        return _checked(content, number)
    if content is None and may_be_missing:
        return ""
    if not isinstance(content, list):
        raise RowError("message whose content is neither a string nor a list of text parts", f"message {number}")
    texts = []
    for place, part in enumerate(content, 1):
        kind = (part.get("type") or "text") if isinstance(part, dict) else "text"
        text = part.get("text") if isinstance(part, dict) else part
        if images is not None and isinstance(part, dict) and kind in prompt_images.PARTS:
            images.add(part)
            texts.append(IMAGE)
            continue
        if kind not in _TEXT_PARTS or not isinstance(text, str):
            raise RowError(
                f"message with a part of type {kind!r}, which is not text", f"message {number}, part {place}"
            )
        texts.append(_checked(text, number))
    return "".join(texts)


def _checked(text: str, number: int) -> str:
    if IMAGE in text:
        raise RowError(f"text with the character U+{ord(IMAGE):X}", f"message {number}")
    return text


def _tool_call(call: Any, number: int) -> dict[str, Any]:
    """A tool call in OpenAI's shape; the arguments are an object, unless their text is not one."""
    function = (call.get("function") or call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError("tool call without a name", f"message {number}")
    arguments = function.get("arguments")
    arguments = function.get("parameters") if arguments is None else arguments
    if isinstance(arguments, str):
        arguments = _json(arguments or "{}", f"message {number}: the arguments of {function['name']}")
    if not isinstance(arguments, dict | None):
        raise RowError("arguments of a tool call that are not an object", f"message {number}")
    made = {"type": "function", "function": {"name": function["name"], "arguments": arguments or {}}}
    return made | ({"id": call["id"]} if isinstance(call.get("id"), str) else {})


def _tools(given: Any) -> list[Mapping[str, Any]] | None:
    if isinstance(given, str):
        given = _json(given, "tools") if given.strip() else None
    if not given:
        return None
    if not isinstance(given, list) or not all(isinstance(tool, dict) for tool in given):
        raise RowError("tools that are not a list of objects", f"they are {type(given).__name__}")
    functions = [tool.get("function") or tool for tool in given]
    if not all(isinstance(function, dict) and isinstance(function.get("name"), str) for function in functions):
        raise RowError("tool without a name")
    return [
        tool if tool.get("function") else {"type": "function", "function": function}
        for tool, function in zip(given, functions, strict=True)
    ]


def _template_kwargs(given: Any) -> Mapping[str, Any]:
    if isinstance(given, str):
        given = _json(given, "chat_template_kwargs") if given.strip() else None
    if not given:
        return {}
    if not isinstance(given, dict):
        raise RowError("chat_template_kwargs that are not an object", f"they are {type(given).__name__}")
    return {key: value for key, value in given.items() if value is not None}


def _json(text: Any, what: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError, TypeError) as error:
        raise RowError("invalid JSON in a message", f"{what}: {str(error)[:100]}") from error


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")
