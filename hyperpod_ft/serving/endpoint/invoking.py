"""Requests to an endpoint's container, through SageMaker's runtime. `client` is boto3's for sagemaker-runtime."""

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from hyperpod_ft.aws.session import error_code, error_message, redacted
from hyperpod_ft.errors import UserError

_JSON = "application/json"


def invoke(client: Any, endpoint: str, component: str | None, request: dict[str, Any]) -> dict[str, Any]:
    """The server's JSON answer. Raises UserError with the server's reason when it refuses the request."""
    try:
        answer = client.invoke_endpoint(**_arguments(endpoint, component, request))
    except client.exceptions.ClientError as error:
        raise _refused(endpoint, error) from error
    return _parsed(answer["Body"].read())


def stream(client: Any, endpoint: str, component: str | None, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The server's events, as they come. Raises UserError as `invoke` does, and for an event that says what failed."""
    try:
        answer = client.invoke_endpoint_with_response_stream(
            **_arguments(endpoint, component, {**request, "stream": True})
        )
        pending = b""
        for part in answer["Body"]:
            pending += part["PayloadPart"]["Bytes"]
            *whole, pending = pending.split(b"\n")
            yield from _events(whole)
        yield from _events([pending])
    except client.exceptions.ClientError as error:
        raise _refused(endpoint, error) from error


def _events(lines: list[bytes]) -> Iterator[dict[str, Any]]:
    """Server-sent events: `data: {...}`; the last is `data: [DONE]`."""
    for line in lines:
        content = line.removeprefix(b"data:").strip()
        if not line.startswith(b"data:") or content == b"[DONE]":
            continue
        event = _parsed(content)
        if "error" in event:
            raise UserError(f"the endpoint's server failed: {_reason(event)}", "see `hyperpod-ft deploy logs`")
        yield event


def _arguments(endpoint: str, component: str | None, request: dict[str, Any]) -> dict[str, Any]:
    made = {"EndpointName": endpoint, "ContentType": _JSON, "Accept": _JSON, "Body": json.dumps(request).encode()}
    return made if component is None else {**made, "InferenceComponentName": component}


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except ValueError as error:
        raise UserError(
            f"the endpoint's answer is not JSON: {body[:200]!r}", "see `hyperpod-ft deploy logs`"
        ) from error
    return value if isinstance(value, dict) else {"error": {"message": str(value)[:200]}}


def _refused(endpoint: str, error: Any) -> UserError:
    if error_code(error) == "ModelError":
        # SageMaker's words, then the container's answer
        original = str(error.response.get("OriginalMessage", "")) or error_message(error)
        status = error.response.get("OriginalStatusCode", "")
        with suppress(ValueError):
            original = _reason(json.loads(original))
        return UserError(
            f"endpoint {endpoint}: its server answered {status}: {redacted(original)}", "see `hyperpod-ft deploy logs`"
        )
    if "no capacity" in error_message(error):
        return UserError(
            f"endpoint {endpoint}: has scaled to zero instances; this request starts one", "ask again in a few minutes"
        )
    return UserError(f"endpoint {endpoint}: {error_code(error)}: {error_message(error)}", "")


def _reason(value: Any) -> str:
    """The message in an OpenAI error."""
    found = value.get("error", value) if isinstance(value, dict) else value
    if isinstance(found, dict):
        found = found.get("message", found)
    return str(found)
