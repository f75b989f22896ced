"""SageMaker's runtime: requests to endpoints, passed on to their containers, outside the stand-in's lock.

POST /endpoints/NAME/invocations                                            InvokeEndpoint
POST /endpoints/NAME/invocations-response-stream                            ...WithResponseStream
POST /endpoints/NAME[/inference-components/IC]/openai/v1/chat/completions   with a bearer token
"""

import base64
import http.client
import json
import re
import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any
from urllib.parse import parse_qs

from tests.aws.endpoints import Hosted
from tests.aws.world import ACCOUNT, World

_PATH = re.compile(
    r"/endpoints/([^/]+)(?:/inference-components/([^/]+))?/(invocations|invocations-response-stream|"
    r"openai/v1/chat/completions)"
)
_REGION = re.compile(r"Credential=[^/]+/\d+/([^/]+)/sagemaker/aws4_request")
_MAX_BODY_BYTES = 6_291_456
_SECONDS = 60  # a container's answer
_TOKEN = "sagemaker-api-key-"
_PIECE = 37  # bytes: the parts of a stream end anywhere, as AWS's do


class _RefusedError(Exception):
    def __init__(self, status: int, kind: str, message: str, **more: Any) -> None:
        super().__init__(message)
        self.status, self.kind, self.body = status, kind, {"message": message, "Message": message, **more}


def is_request(path: str) -> bool:
    return path.startswith("/endpoints/")


def respond(world: World, lock: threading.RLock, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
    try:
        found = _PATH.fullmatch(environ["PATH_INFO"])
        if not found:
            raise _RefusedError(404, "UnknownOperationException", "no such path")
        name, component, operation = found.groups()
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        if len(body) > _MAX_BODY_BYTES:
            raise _RefusedError(413, "ValidationError", f"request has {len(body)} bytes")
        given = environ.get("HTTP_AUTHORIZATION", "")
        region = _region_of_token(given) if operation.startswith("openai") else _REGION.search(given)[1]  # type: ignore[index]
        component = component or environ.get("HTTP_X_AMZN_SAGEMAKER_INFERENCE_COMPONENT")
        with lock:
            world.requests.append(("sagemaker-runtime", operation))
            port = _port(world, region, name, component)
        answer = _ask(port, body)
    except _RefusedError as error:
        content = json.dumps(error.body).encode()
        start(f"{error.status} Error", [("Content-Type", "application/json"), ("x-amzn-errortype", error.kind)])
        return [content]
    kind = answer.getheader("Content-Type", "application/json")
    if operation == "invocations-response-stream":
        head = [("Content-Type", "application/vnd.amazon.eventstream"), ("x-amzn-sagemaker-content-type", kind)]
        start("200 OK", head)
        return _event_stream(answer)
    start("200 OK", [("Content-Type", kind)])
    return iter(lambda: answer.read1(_PIECE) if operation.startswith("openai") else answer.read(), b"")


def _port(world: World, region: str, name: str, component: str | None) -> int:
    here = world.region(region)
    endpoint: Hosted | None = here.endpoints.get(name)
    if endpoint is None or endpoint.status != "InService":
        raise _RefusedError(400, "ValidationError", f"Endpoint {name} of account {ACCOUNT} not found.")
    hosted: Hosted | None = here.components.get(component) if component else endpoint
    if hosted is None or hosted.container is None:
        raise _RefusedError(400, "ValidationError", "Inference Component Name header is required, or is not known")
    return hosted.container.port


def _ask(port: int, body: bytes) -> http.client.HTTPResponse:
    """The container's answer to /invocations; one that is not 200 becomes a ModelError, as AWS words it."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_SECONDS)
    try:
        connection.request("POST", "/invocations", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
    except OSError as error:
        raise _RefusedError(424, "ModelError", f"the container does not answer: {error}") from error
    if answer.status == 200:
        return answer
    original = answer.read().decode()
    raise _RefusedError(
        424,
        "ModelError",
        f"Received {'client' if answer.status < 500 else 'server'} error ({answer.status}) from primary with message"
        f' "{original}".',
        OriginalMessage=original,
        OriginalStatusCode=answer.status,
    )


def _region_of_token(authorization: str) -> str:
    """The region that a bearer token was signed for: a presigned CallWithBearerToken that has not ended."""
    token = authorization.removeprefix("Bearer ")
    if not token.startswith(_TOKEN):
        raise _RefusedError(401, "UnauthorizedException", "no bearer token of SageMaker")
    url = base64.b64decode(token.removeprefix(_TOKEN)).decode()
    host, _, query = url.partition("/?")
    values = {key: one[0] for key, one in parse_qs(query).items()}
    signed = datetime.strptime(values["X-Amz-Date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=timezone.utc)
    seconds = int(values["X-Amz-Expires"])
    if (
        host != "sagemaker.amazonaws.com"
        or values["Action"] != "CallWithBearerToken"
        or values["Version"] != "1"
        or not 0 < seconds <= 12 * 3600
        or datetime.now(timezone.utc) > signed + timedelta(seconds=seconds)
    ):
        raise _RefusedError(403, "AccessDeniedException", "the bearer token is not valid")
    return values["X-Amz-Credential"].split("/")[2]


def _event_stream(answer: http.client.HTTPResponse) -> Iterator[bytes]:
    """application/vnd.amazon.eventstream: each message has lengths, headers, payload, and two CRCs."""
    headers = b"".join(
        struct.pack("!B", len(name)) + name + b"\x07" + struct.pack("!H", len(value)) + value
        for name, value in (
            (b":event-type", b"PayloadPart"),
            (b":content-type", b"application/octet-stream"),
            (b":message-type", b"event"),
        )
    )
    while payload := answer.read1(_PIECE):
        prelude = struct.pack("!II", 16 + len(headers) + len(payload), len(headers))
        message = prelude + struct.pack("!I", zlib.crc32(prelude)) + headers + payload
        yield message + struct.pack("!I", zlib.crc32(message))
