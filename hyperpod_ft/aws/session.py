"""The only module that makes boto3 clients: they retry, and their errors are one line. cluster/ssh/ runs the AWS CLI.

boto3 is imported with the first client: it loads slowly, belongs to an extra, and most commands do not need it.
boto3 finds the credentials itself; none are read, kept or printed here.
"""

import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hyperpod_ft import __version__
from hyperpod_ft.errors import UserError
from hyperpod_ft.shipped import installing

_CONNECT_SECONDS, _READ_SECONDS = 10, 60
CONNECTIONS = 20  # of a client, at most
_MAX_MESSAGE_LENGTH = 400

DENIED = ("AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "AllAccessDisabled", "403", "Forbidden")
_THROTTLED = (
    *("Throttling", "ThrottlingException", "ThrottledException", "RequestThrottled", "RequestThrottledException"),
    *(
        "RequestLimitExceeded",
        "TooManyRequestsException",
        "BandwidthLimitExceeded",
        "SlowDown",
        "PriorRequestNotComplete",
    ),
)
_EXPIRED = ("ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired")
_INVALID = (
    *("InvalidClientTokenId", "UnrecognizedClientException", "SignatureDoesNotMatch", "InvalidAccessKeyId"),
    *("AuthFailure", "InvalidToken", "InvalidSignatureException", "IncompleteSignature", "MissingAuthenticationToken"),
    "RequestTimeTooSkewed",
)
_RENEW = "renew the AWS credentials (`aws sso login`, or export new ones)"
# "User: arn:aws:iam::1:user/a is not authorized to perform: sagemaker:CreateCluster on resource: ..."
_ACTION = re.compile(r"perform:? +([A-Za-z0-9-]+:[A-Za-z*]+)")
# Never shown: signatures and tokens of signed URLs, access keys.
_SECRET = re.compile(
    r"(?i)(X-Amz-(?:Signature|Credential|Security-Token)=)[^&\s\"']+|"
    r"((?:Signature|AWSAccessKeyId|aws_session_token|aws_secret_access_key)=)[^&\s\"']+|"
    r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"
)


_OBSERVERS: list[Callable[[Any], None]] = []  # each is given every client that is made


@contextmanager
def observed(by: Callable[[Any], None]) -> Iterator[None]:
    """Give `by` every client that the block makes: it may register for botocore's events of requests and answers."""
    _OBSERVERS.append(by)
    try:
        yield
    finally:
        _OBSERVERS.remove(by)


@dataclass(frozen=True)
class Session:
    """One region and one profile; None means boto3's default (AWS_REGION and AWS_PROFILE, or the user's files).

    AWS_PROFILE is read once: programs that get the profile as an argument, perhaps later, then use the same one.
    """

    region: str | None = None
    profile: str | None = None
    _clients: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "profile", self.profile or os.environ.get("AWS_PROFILE") or None)

    def client(self, service: str) -> Any:
        """A cached boto3 client. Only inside `explained`.

        Raises botocore's errors for a missing region or an unknown profile, and ImportError without boto3.
        """
        with self._lock:
            if service not in self._clients:
                self._clients[service] = self._new(service)
            return self._clients[service]

    def credentials(self) -> Any:
        """botocore's credentials, to sign requests that no client sends; None without any. Only inside `explained`."""
        with self._lock:
            return self._boto3.get_credentials()

    def renew(self) -> None:
        """Find the credentials anew for the next client: the user may have logged in again."""
        with self._lock:
            self._clients.clear()
            self.__dict__.pop("_boto3", None)

    def _new(self, service: str) -> Any:
        from botocore.config import Config  # noqa: PLC0415

        config = Config(
            retries={"mode": "standard"},
            connect_timeout=_CONNECT_SECONDS,
            read_timeout=_READ_SECONDS,
            max_pool_connections=CONNECTIONS,
            user_agent_extra=f"hyperpod-ft/{__version__}",
        )
        client = self._boto3.client(service, config=config)
        for observe in _OBSERVERS:
            observe(client)
        return client

    @cached_property
    def _boto3(self) -> Any:
        """One for all clients, since each session reads boto3's files of endpoints anew. Sessions are not thread-safe:
        it is used under the lock, and boto3's default one, which the whole process shares, not at all.
        """
        import boto3  # noqa: PLC0415 - see above

        return boto3.Session(profile_name=self.profile, region_name=self.region or os.environ.get("AWS_REGION"))


@contextmanager
def explained(subject: str, remedies: Mapping[str, str] | None = None) -> Iterator[None]:
    """Turn botocore's errors into UserError: "`subject`: what went wrong; what to do".

    `remedies`: what to do, by error code, where the caller knows better. Other AWS errors keep AWS's message, without
    anything that looks like a credential.
    """
    try:
        import boto3  # noqa: F401, PLC0415 - see above
        from botocore import exceptions  # noqa: PLC0415
    except ImportError as error:
        raise UserError(
            f"{subject}: boto3 is not installed", f"install it: {installing('aws', sys.executable)}"
        ) from error
    try:
        yield
    except (exceptions.ClientError, exceptions.BotoCoreError) as error:
        problem, remedy = explain(error, remedies or {})
        raise UserError(f"{subject}: {problem}", remedy) from error


# Operations whose permission has another name ("Actions, resources, and condition keys for Amazon S3")
_PERMISSIONS = {"HeadBucket": "s3:ListBucket", "HeadObject": "s3:GetObject", "ListObjectsV2": "s3:ListBucket"}
_UNREACHABLE = "check the network, proxy and region, then run the command again"
_LOCAL = {
    "NoCredentialsError": ("no AWS credentials", "set AWS_PROFILE, or attach a role to this machine"),
    "PartialCredentialsError": ("incomplete AWS credentials", "set both the key and the secret, or AWS_PROFILE"),
    "CredentialRetrievalError": ("cannot retrieve the AWS credentials", _RENEW),
    "NoRegionError": ("no AWS region", "pass a cluster file or --region, or set AWS_REGION"),
    "InvalidRegionError": ("no such AWS region", "correct AWS_REGION"),
    "ProfileNotFound": ("no such AWS profile", "correct AWS_PROFILE; `aws configure list-profiles` lists them"),
    "TokenRetrievalError": ("the AWS sign-in has expired", _RENEW),
    "SSOTokenLoadError": ("the AWS sign-in has expired", _RENEW),
    "UnauthorizedSSOTokenError": ("the AWS sign-in has expired", _RENEW),
    "EndpointConnectionError": ("AWS cannot be reached (EndpointConnectionError)", _UNREACHABLE),
    "ConnectTimeoutError": ("AWS cannot be reached (ConnectTimeoutError)", _UNREACHABLE),
    "ReadTimeoutError": ("AWS does not answer (ReadTimeoutError)", _UNREACHABLE),
    "ConnectionClosedError": ("AWS closed the connection (ConnectionClosedError)", _UNREACHABLE),
    "ProxyConnectionError": ("the proxy cannot be reached", "check HTTPS_PROXY"),
    "SSLError": (
        "the TLS connection to AWS failed",
        "check this machine's clock, and AWS_CA_BUNDLE if there is a proxy",
    ),
}


def error_code(error: BaseException) -> str:
    """AWS's error code (`ResourceNotFound`); empty for any other exception."""
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


def answer_or_none(
    call: Callable[..., dict[str, Any]], *codes: str, saying: str = "", **arguments: Any
) -> dict[str, Any] | None:
    """The answer of a client's method; None where AWS refuses with one of these codes: mostly, there is no such thing.

    `saying`: a pattern in AWS's message, where the code alone does not tell. Raises botocore's other errors.
    """
    from botocore.exceptions import ClientError  # noqa: PLC0415 - see above

    try:
        return call(**arguments)
    except ClientError as error:
        if error_code(error) in codes and re.search(saying, error_message(error)):
            return None
        raise


def paged(client: Any, operation: str, key: str, **arguments: Any) -> Iterator[Any]:
    """The entries under `key` in all pages of an operation that lists, such as `list_clusters`."""
    for page in client.get_paginator(operation).paginate(**arguments):
        yield from page[key]


def error_message(error: BaseException) -> str:
    """AWS's error message, without secrets."""
    response = getattr(error, "response", None)
    return redacted(str(response.get("Error", {}).get("Message", ""))) if isinstance(response, dict) else ""


def redacted(text: str) -> str:
    """`text` on one line, shortened, without signatures, tokens and access keys."""
    line = _SECRET.sub(lambda match: f"{match[1] or match[2] or ''}...", " ".join(text.split()))
    return line if len(line) <= _MAX_MESSAGE_LENGTH else f"{line[:_MAX_MESSAGE_LENGTH]}..."


# Errors that may pass: after a new login, once the network is back, or with time
_PASSING = (
    *("NoCredentialsError", "CredentialRetrievalError", "TokenRetrievalError", "SSOTokenLoadError"),
    *("UnauthorizedSSOTokenError", "LoginRefreshRequired", "LoginTokenLoadError"),
    *("EndpointConnectionError", "ConnectTimeoutError", "ReadTimeoutError", "ConnectionClosedError"),
    *("ProxyConnectionError", "SSLError"),
)


def may_pass(error: BaseException) -> bool:
    """Whether an error, explained or not, is of credentials, the network or throttling: the same may succeed later."""
    known = error_code(error) in (*_EXPIRED, *_INVALID, *_THROTTLED) or type(error).__name__ in _PASSING
    return known or (error.__cause__ is not None and may_pass(error.__cause__))


def explain(error: BaseException, remedies: Mapping[str, str]) -> tuple[str, str]:
    """The problem and the remedy for an error of botocore; `remedies` as for `explained`."""
    code, operation = error_code(error), getattr(error, "operation_name", "")
    if not code:
        name = type(error).__name__
        return _LOCAL.get(name, (f"{name}: {redacted(str(error))}", "check the network, region and profile"))
    if code in remedies:
        return f"AWS answered {code}", remedies[code]
    if code in DENIED:
        found = _ACTION.search(error_message(error))
        action = found[1] if found else _PERMISSIONS.get(operation, operation)
        return f"access denied to {action} ({code})", f"grant these credentials {action}"
    if code in _EXPIRED:
        return f"the AWS credentials have expired ({code})", _RENEW
    if code in _INVALID:
        return (
            f"AWS rejected the credentials ({code})",
            f"{_RENEW}; a wrong clock on this machine has the same effect",
        )
    if code in _THROTTLED:
        return f"AWS throttled {operation} ({code})", "wait a minute and run the command again"
    return f"AWS refused {operation} with {code}: {error_message(error)}", ""
