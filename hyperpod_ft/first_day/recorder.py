"""What the kit asked of AWS, and what AWS answered, for a report: without bodies, secrets and account numbers."""

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hyperpod_ft.aws.session import redacted
from hyperpod_ft.config.secrets import is_secret

_LONGEST = 200  # characters of a text
_MOST = 20  # items of a list


@dataclass
class _Exchange:
    """Requests that are alike, with the same answer."""

    first: str  # time of day, UTC
    last: str = ""
    count: int = 0
    seconds: float = 0.0


@dataclass
class Recorder:
    """Requests and answers, by operation, parameters and answer; of S3, whose objects are many, without parameters.

    Any thread may send requests.
    """

    _found: dict[tuple[str, str, str], _Exchange] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def observe(self, client: Any) -> None:
        """For `session.observed`."""
        events = client.meta.events
        events.register("before-parameter-build", self._asked)
        events.register("after-call", self._answered)
        events.register("after-call-error", self._unanswered)

    def lines(self) -> list[str]:
        """One for each kind of exchange, in the order of the first."""
        with self._lock:
            found = sorted(self._found.items(), key=lambda item: item[1].first)
            return [_line(*key, exchange) for key, exchange in found]

    def _asked(self, params: Mapping[str, Any], context: dict[str, Any], **_: Any) -> None:
        context["hyperpod_ft"] = (_now(), time.monotonic(), json.dumps(_shown(params)))

    def _answered(self, http_response: Any, parsed: Mapping[str, Any], context: Any, **event: Any) -> None:
        error = parsed.get("Error")
        why = redacted(f"{error.get('Code')}: {error.get('Message')}") if error else ""
        self._add(event["event_name"], context, f"{http_response.status_code} {why}".rstrip())

    def _unanswered(self, exception: BaseException, context: Any, **event: Any) -> None:
        self._add(event["event_name"], context, f"no answer: {type(exception).__name__}")

    def _add(self, event: str, context: Mapping[str, Any], answer: str) -> None:
        _, service, operation = event.split(".")
        now, began, parameters = context.get("hyperpod_ft", (_now(), time.monotonic(), "{}"))
        key = f"{service} {operation}", answer, "" if service == "s3" else parameters
        with self._lock:
            found = self._found.setdefault(key, _Exchange(now))
            found.count += 1
            found.last = now
            found.seconds += time.monotonic() - began


def _line(what: str, answer: str, parameters: str, found: _Exchange) -> str:
    times = f", {found.count} times until {found.last}" if found.count > 1 else ""
    took = f"{found.seconds / found.count:.2f} s{' each' * bool(times)}"
    return f"{found.first} {what} -> {answer} ({took}{times}) {parameters}".rstrip()


def _now() -> str:
    return time.strftime("%H:%M:%S", time.gmtime())


def _shown(value: Any, name: str = "") -> Any:
    """A parameter, as it may be shown."""
    if isinstance(value, Mapping):
        # `Key` is that of a tag or an object
        return {key: _shown(each, "" if key == "Key" else str(key)) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_shown(each) for each in value[:_MOST]] + [f"... {len(value)} in all"] * (len(value) > _MOST)
    if isinstance(value, str):
        return "***" if is_secret(name, value) else value if len(value) <= _LONGEST else f"<{len(value)} characters>"
    return value if value is None or isinstance(value, bool | int | float) else f"<{type(value).__name__}>"
