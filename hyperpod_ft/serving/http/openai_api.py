"""The OpenAI API as data: JSON of a request to a `Request`, an answer to JSON. Starts and reads nothing.

Fields: https://platform.openai.com/docs/api-reference/chat and .../completions.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hyperpod_ft.serving.http.errors import HttpError

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


@dataclass(frozen=True)
class Request:
    """One question. Exactly one of `messages` and `prompt` (text or token ids) is given.

    `model` is empty when the request names none. `temperature` 0 is a greedy answer.
    """

    model: str = ""
    messages: tuple[dict[str, str], ...] | None = None
    prompt: str | tuple[int, ...] | None = None
    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False


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
    stream = _flag(values, "stream")
    options = values.get("stream_options") or {}
    if not isinstance(options, dict):
        raise HttpError(400, "stream_options: must be an object")
    most = next(
        (values[name] for name in ("max_completion_tokens", "max_tokens") if values.get(name) is not None), None
    )
    return Request(
        model=_text(values, "model"),
        messages=_messages(values.get("messages")) if chat else None,
        prompt=None if chat else _prompt(values.get("prompt")),
        max_tokens=None if most is None else _whole(most, "max_tokens", least=1),
        temperature=_temperature(values),
        top_p=_number(values, "top_p", 1.0, 0.0, 1.0),
        seed=None if values.get("seed") is None else _whole(values["seed"], "seed"),
        stop=_stops(values.get("stop")),
        stream=stream,
        include_usage=_flag(options, "include_usage"),
    )


def _messages(given: Any) -> tuple[dict[str, str], ...]:
    if not isinstance(given, list) or not given:
        raise HttpError(400, "messages: must be a list of messages")
    found = []
    for number, message in enumerate(given):
        where = f"messages.{number}"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise HttpError(400, f"{where}: must be an object with a role")
        found.append({"role": message["role"], "content": _content(message.get("content"), where)})
    if found[-1]["role"] == "assistant":
        raise HttpError(400, "messages: the last one is from the assistant; end with the user's")
    return tuple(found)


def _content(given: Any, where: str) -> str:
    """A string, or a list of text parts."""
    if isinstance(given, str):
        return given
    if isinstance(given, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in given):
        return "".join(part["text"] for part in given)
    raise HttpError(400, f"{where}.content: must be text")


def _prompt(given: Any) -> str | tuple[int, ...]:
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], (str, list)):
        given = given[0]
    if isinstance(given, str) and given:
        return given
    if isinstance(given, list) and given and all(type(token) is int and token >= 0 for token in given):
        return tuple(given)
    raise HttpError(400, "prompt: must be a string or a list of token ids; send one prompt per request")


def _stops(given: Any) -> tuple[str, ...]:
    listed = [given] if isinstance(given, str) else given or []
    if not isinstance(listed, list) or len(listed) > _MAX_STOPS or not all(isinstance(one, str) for one in listed):
        raise HttpError(400, f"stop: must be a string or a list of at most {_MAX_STOPS} strings")
    return tuple(one for one in listed if one)


def _text(values: Mapping[str, Any], name: str) -> str:
    given = values.get(name)
    if given is not None and not isinstance(given, str):
        raise HttpError(400, f"{name}: must be a string")
    return given or ""


def _flag(values: Mapping[str, Any], name: str) -> bool:
    given = values.get(name)
    if given is not None and not isinstance(given, bool):
        raise HttpError(400, f"{name}: must be true or false")
    return bool(given)


def _whole(given: Any, name: str, least: int | None = None) -> int:
    if not isinstance(given, int) or isinstance(given, bool) or abs(given) >= 1 << 63:
        raise HttpError(400, f"{name}: must be a whole number")
    if least is not None and given < least:
        raise HttpError(400, f"{name}: must be {least} or more")
    return given


def _temperature(values: Mapping[str, Any]) -> float:
    given = _number(values, "temperature", 0.0, 0.0, 2.0)
    if 0 < given < _MIN_TEMPERATURE:
        raise HttpError(400, f"temperature: must be 0, for a greedy answer, or at least {_MIN_TEMPERATURE:g}")
    return given


def _number(values: Mapping[str, Any], name: str, default: float, least: float, most: float) -> float:
    given = values.get(name)
    if given is None:
        return default
    if not isinstance(given, (int, float)) or isinstance(given, bool) or not least <= given <= most:
        raise HttpError(400, f"{name}: must be a number from {least:g} to {most:g}")
    return float(given)


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
