"""Requests to an endpoint's container, through SageMaker's runtime, and the token for other clients.

`client` is boto3's for sagemaker-runtime.
"""

import base64
import json
from collections.abc import Iterator, Mapping
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


def piece_of(choice: Mapping[str, Any]) -> str:
    """The text of a stream's choice, of a prompt or a chat; what the model thinks is part of it, too."""
    delta = choice.get("delta") or {}
    # vLLM has renamed its reasoning_content
    given = (choice.get("text"), delta.get("content"), delta.get("reasoning"), delta.get("reasoning_content"))
    return next((text for text in given if text), "")


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


MAX_SECONDS = 12 * 3600
_PREFIX = "sagemaker-api-key-"


def base_url(runtime_url: str, endpoint: str, component: str | None = None) -> str:
    """The base URL for OpenAI clients.

    `runtime_url`: of SageMaker's runtime in the region, as boto3's client has it. `component`: the inference component
    of an endpoint that scales to zero.
    """
    middle = f"/inference-components/{component}" if component else ""
    return f"{runtime_url}/endpoints/{endpoint}{middle}/openai/v1"


def bearer_token(credentials: Any, region: str) -> str:
    """A short-lived token with which OpenAI clients reach an endpoint.

    It is `sagemaker-api-key-` and, in base64, a presigned request (`POST sagemaker.amazonaws.com/?Action=
    CallWithBearerToken`), as AWS's own token generator makes it: nothing is sent, and the caller's credentials sign it.
    It ends after at most 12 hours, or with temporary credentials. `credentials` are botocore's, or None when it found
    none: then UserError is raised.
    """
    from botocore.auth import SigV4QueryAuth  # noqa: PLC0415 - only this command
    from botocore.awsrequest import AWSRequest  # noqa: PLC0415 - as above

    if credentials is None:
        raise UserError("no AWS credentials", "set AWS_PROFILE, or attach a role to this machine")
    request = AWSRequest(
        method="POST",
        url="https://sagemaker.amazonaws.com/",
        headers={"host": "sagemaker.amazonaws.com"},
        params={"Action": "CallWithBearerToken"},
    )
    SigV4QueryAuth(credentials, "sagemaker", region, expires=MAX_SECONDS).add_auth(request)
    signed = f"{request.url.removeprefix('https://')}&Version=1"
    return _PREFIX + base64.b64encode(signed.encode()).decode()
