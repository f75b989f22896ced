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
from typing_extensions import TypedDict


class HttpError(Exception):
    """An error for the client: HTTP status, a message, and OpenAI's `type` and `code`."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code

    def as_dict(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": None, "code": self.code}}


FinishReason = Literal["stop", "length"]

# These would change the answer, and this server does not support them. Any other unknown field is ignored, as by other
# servers.
_UNSUPPORTED = {
    "tools": [],
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
_MAX_STOPS = 16
# Scores divided by less may exceed 32-bit floats, and drawing from those ends the process's use of its GPU.
_MIN_TEMPERATURE = 1e-6


def _joined(content: Any) -> Any:
    """The text of a list of text parts."""
    parts = content if isinstance(content, list) else []
    if parts and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        return "".join(part["text"] for part in parts)
    return content


class Message(TypedDict):
    """One message of a chat."""

    role: StrictStr
    content: Annotated[StrictStr, BeforeValidator(_joined)]


def _end_with_the_user(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    if messages[-1]["role"] == "assistant":
        raise ValueError("the last one is from the assistant; end with the user's")
    return messages


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
    messages: Annotated[tuple[Message, ...], Field(min_length=1), AfterValidator(_end_with_the_user)] | None = None
    prompt: Annotated[str | tuple[int, ...] | None, BeforeValidator(_single)] = None
    max_tokens: Annotated[_Integer, Field(ge=1)] | None = None
    temperature: Annotated[_Number, Field(le=2.0), AfterValidator(_drawable)] = 0.0
    top_p: Annotated[_Number, Field(le=1.0)] = 1.0
    seed: _Integer | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(_stops)] = ()
    stream: StrictBool = False
    stream_options: StreamOptions = StreamOptions()


@dataclass(frozen=True)
class Answer:
    """A complete answer."""

    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int

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
            choice["message"] = {"role": "assistant", "content": answer.text}
        else:
            choice["text"] = answer.text
        return self._head(stream=False) | {"choices": [choice], "usage": answer.usage}

    def first(self) -> dict[str, Any] | None:
        """The event before the text: a chat's names the role."""
        return self._event({"role": "assistant", "content": ""}) if self.chat else None

    def piece(self, text: str) -> dict[str, Any]:
        return self._event({"content": text} if self.chat else text)

    def last(self, answer: Answer) -> dict[str, Any]:
        return self._event({} if self.chat else "", answer.finish_reason)

    def usage(self, answer: Answer) -> dict[str, Any]:
        return self._head(stream=True) | {"choices": [], "usage": answer.usage}

    def _event(self, content: dict[str, str] | str, finish_reason: FinishReason | None = None) -> dict[str, Any]:
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
