"""The OpenAI API as data: JSON of a request to a `Request`, an answer to JSON. Starts and reads nothing.

Fields: https://platform.openai.com/docs/api-reference/chat and .../completions.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    StrictBool,
    StrictStr,
    ValidationError,
)

from hyperpod_ft.serving.markup import parts
from hyperpod_ft.serving.markup.parts import Part, Reasoning, ToolCall


class HttpError(Exception):
    """An error for the client: HTTP status, a message, and OpenAI's `type` and `code`."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code

    def as_dict(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": None, "code": self.code}}


FinishReason = Literal["stop", "length", "tool_calls"]

# These would change the answer, and this server does not support them. Any other unknown field is ignored, as by other
# servers.
_UNSUPPORTED = {
    "functions": [],
    "logprobs": False,
    "top_logprobs": 0,
    "n": 1,
    "best_of": 1,
    "echo": False,
    "suffix": "",
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "response_format": {"type": "text"},
}
# A prompt that is text holds all that they would say.
_ONLY_CHATS = ("tools", "chat_template_kwargs", "reasoning_effort")
_MAX_STOPS = 16
# Scores divided by less may exceed 32-bit floats, and drawing from those ends the process's use of its GPU.
_MIN_TEMPERATURE = 1e-6


# Its fields are the chat template's: `data.text.chat` reads them.
Message = dict[str, Any]


def _end_with_a_question(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    if messages[-1].get("role") == "assistant":
        raise ValueError("the last one is from the assistant; end with the user's, or a tool's")
    return messages


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise ValueError('must be {"type": "function", "function": {...}}; this server has no other tools')
    if not isinstance(name := function.get("name"), str) or not name.strip():
        raise ValueError("function.name must be a string")
    if not isinstance(function.get("parameters", {}), (dict, type(None))):
        raise ValueError("function.parameters must be a JSON schema, an object")
    return tool


def _unforced(choice: Any) -> Any:
    if choice not in ("auto", "none"):
        raise ValueError("must be auto or none: this server cannot make a model call a tool")
    return choice


def _single(prompt: Any) -> Any:
    """A list of one prompt is this prompt."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    tokens = isinstance(prompt, (list, tuple)) and all(type(token) is int and token >= 0 for token in prompt)
    if prompt is None or isinstance(prompt, str) or tokens:
        return prompt
    raise ValueError("must be a string or a list of token ids; send one prompt per request")


def _stops(stop: Any) -> tuple[str, ...]:
    listed = [stop] if isinstance(stop, str) else stop
    if (
        not isinstance(listed, (list, tuple))
        or len(listed) > _MAX_STOPS
        or not all(isinstance(one, str) for one in listed)
    ):
        raise ValueError(f"must be a string or a list of at most {_MAX_STOPS} strings")
    return tuple(one for one in listed if one)


def _drawable(temperature: float) -> float:
    if 0 < temperature < _MIN_TEMPERATURE:
        raise ValueError(f"must be 0, for a greedy answer, or at least {_MIN_TEMPERATURE:g}")
    return temperature


_Integer = Annotated[int, Strict(), Field(gt=-(1 << 63), lt=1 << 63)]
_Number = Annotated[float, Strict(), Field(ge=0.0, allow_inf_nan=False)]


class StreamOptions(BaseModel):
    """How a stream is wanted."""

    include_usage: StrictBool | None = None


class Request(BaseModel):
    """One question. Exactly one of `messages` and `prompt` (text or token ids) is given.

    `model` is empty when the request names none. `temperature` 0 is a greedy answer.
    """

    model_config = ConfigDict(frozen=True)

    model: StrictStr = ""
    messages: Annotated[tuple[Message, ...], Field(min_length=1), AfterValidator(_end_with_a_question)] | None = None
    tools: tuple[Annotated[dict[str, Any], AfterValidator(_function)], ...] = ()
    tool_choice: Annotated[Literal["auto", "none"], BeforeValidator(_unforced)] = "auto"
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: StrictStr | None = None
    prompt: Annotated[str | tuple[int, ...] | None, BeforeValidator(_single)] = None
    max_tokens: Annotated[_Integer, Field(ge=1)] | None = None
    temperature: Annotated[_Number, Field(le=2.0), AfterValidator(_drawable)] = 0.0
    top_p: Annotated[_Number, Field(le=1.0)] = 1.0
    seed: _Integer | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(_stops)] = ()
    stream: StrictBool = False
    stream_options: StreamOptions = StreamOptions()

    @property
    def callable_tools(self) -> tuple[dict[str, Any], ...]:
        """The tools that the answer may call; those of a request that wants none called are not shown to the model."""
        return () if self.tool_choice == "none" else self.tools

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """What the chat template is given besides messages and tools."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return effort | self.chat_template_kwargs


@dataclass(frozen=True)
class Answer:
    """A complete answer, in parts. `ended`: the model or a stop text ended it, and not the limit."""

    parts: tuple[Part, ...]
    ended: bool
    prompt_tokens: int
    completion_tokens: int

    @property
    def text(self) -> str:
        return parts.content(self.parts)

    @property
    def finish_reason(self) -> FinishReason:
        if not self.ended:
            return "length"
        return "tool_calls" if parts.tool_calls(self.parts) else "stop"

    @property
    def usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


def parse(body: bytes, *, chat: bool | None) -> Request:
    """The request in a body; `chat` None: `messages` decides, as on SageMaker's /invocations.

    Raises HttpError (400) that names the field.
    """
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise HttpError(400, f"the body is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise HttpError(400, "the body must be a JSON object")
    for name, harmless in _UNSUPPORTED.items():
        if values.get(name) not in (None, harmless):
            raise HttpError(400, f"{name}: this server does not support it; leave it out", "unsupported_parameter")
    if chat is None:
        chat = "messages" in values
    asked = "messages" if chat else "prompt"
    for name in () if chat else _ONLY_CHATS:
        if values.get(name):
            raise HttpError(400, f"{name}: only for messages", "unsupported_parameter")
    given = {name: value for name, value in values.items() if value is not None and name not in ("messages", "prompt")}
    if "max_completion_tokens" in given:
        given["max_tokens"] = given["max_completion_tokens"]
    try:
        request = Request.model_validate(given | {asked: values.get(asked) or ()})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise HttpError(400, f"{field}: {first['msg'].removeprefix('Value error, ')}") from error
    if not request.messages and not request.prompt:
        raise HttpError(400, "prompt: is empty")
    return request


@dataclass(frozen=True)
class Reply:
    """The head that all JSON of one answer shares. `created`: seconds since 1970."""

    number: str
    created: int
    model: str
    chat: bool

    def whole(self, answer: Answer) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": answer.finish_reason, "logprobs": None}
        if self.chat:
            choice["message"] = self._message(answer)
        else:
            choice["text"] = answer.text
        return self._head(stream=False) | {"choices": [choice], "usage": answer.usage}

    def first(self) -> dict[str, Any] | None:
        """The event before the text: a chat's names the role."""
        return self._event({"role": "assistant", "content": ""}) if self.chat else None

    def piece(self, part: Part, calls: int) -> dict[str, Any]:
        """The event of a part; `calls` of tools came before it."""
        if isinstance(part, ToolCall):
            return self._event({"tool_calls": [{"index": calls, **self._call(part, calls)}]})
        if isinstance(part, Reasoning):
            return self._event({"reasoning_content": part.text})
        return self._event({"content": part.text} if self.chat else part.text)

    def last(self, answer: Answer) -> dict[str, Any]:
        return self._event({} if self.chat else "", answer.finish_reason)

    def usage(self, answer: Answer) -> dict[str, Any]:
        return self._head(stream=True) | {"choices": [], "usage": answer.usage}

    def _message(self, answer: Answer) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text}
        if thought := parts.reasoning(answer.parts):
            message["reasoning_content"] = thought
        if calls := parts.tool_calls(answer.parts):
            message["tool_calls"] = [self._call(call, number) for number, call in enumerate(calls)]
        if not answer.text and len(message) > 2:
            message["content"] = None
        return message

    def _call(self, call: ToolCall, number: int) -> dict[str, Any]:
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": f"call_{self.number}_{number}", "type": "function", "function": function}

    def _event(self, content: dict[str, Any] | str, finish_reason: FinishReason | None = None) -> dict[str, Any]:
        choice = {
            "index": 0,
            "delta" if self.chat else "text": content,
            "finish_reason": finish_reason,
            "logprobs": None,
        }
        return self._head(stream=True) | {"choices": [choice]}

    def _head(self, *, stream: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if stream else "chat.completion") if self.chat else "text_completion"
        prefix = "chatcmpl" if self.chat else "cmpl"
        return {"id": f"{prefix}-{self.number}", "object": kind, "created": self.created, "model": self.model}


def model_card(name: str, created: int, *, chat: bool) -> dict[str, Any]:
    """An entry of /v1/models; `chat` is this server's own: whether there is a chat template."""
    return {"id": name, "object": "model", "created": created, "owned_by": "hyperpod-ft", "chat": chat}


END_OF_STREAM = b"data: [DONE]\n\n"


def event(value: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"
