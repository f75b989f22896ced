"""AWS's native S3 client (package awscrt), on the instance types for which boto3 chooses it by itself.

boto3 takes it on those with the fastest networks (p4d, p5, p6, trn1.32xlarge, ...) when `boto3[crt]` is installed. It
transfers a file in parallel ranges, in native threads. It ignores the endpoint that a client was given,
always uses TLS, and cannot connect to an endpoint with a port: so only for AWS's own endpoints.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hyperpod_ft.aws.session import redacted
from hyperpod_ft.errors import UserError


def is_used(client: Any) -> bool:
    """Whether boto3 transfers this client's files with it."""
    endpoint = urlsplit(client.meta.endpoint_url)
    if endpoint.port is not None or not (endpoint.hostname or "").endswith((".amazonaws.com", ".amazonaws.com.cn")):
        return False
    try:
        from awscrt.s3 import is_optimized_for_system  # noqa: PLC0415 - an optional package
    except ImportError:
        return False
    return bool(is_optimized_for_system())


def upload(client: Any, path: Path, bucket: str, key: str, metadata: dict[str, str]) -> None:
    """Raises botocore's errors, and UserError for those of the native client."""
    with _explained(path):
        client.upload_file(str(path), bucket, key, ExtraArgs={"Metadata": metadata}, Config=_config())


def download(client: Any, bucket: str, key: str, path: Path) -> None:
    """Raises as `upload` does."""
    with _explained(path):
        client.download_file(bucket, key, str(path), Config=_config())


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    from boto3.exceptions import Boto3Error  # noqa: PLC0415 - boto3 belongs to an extra
    from botocore.exceptions import ClientError  # noqa: PLC0415

    try:
        yield
    except Boto3Error as error:
        answer = error.__cause__ or error.__context__
        if isinstance(answer, ClientError):  # boto3 wraps S3's answer to an upload, which the caller explains
            raise answer from None
        raise _failed(path, error) from error
    except Exception as error:
        if not type(error).__module__.startswith("awscrt."):
            raise
        raise _failed(path, error) from error


def _failed(path: Path, error: Exception) -> UserError:
    problem = f"{path}: AWS's native S3 client failed: {redacted(str(error))}"
    return UserError(problem, "check the network and run the command again")


def _config() -> Any:
    from boto3.s3.transfer import TransferConfig  # noqa: PLC0415 - boto3 belongs to an extra

    return TransferConfig(preferred_transfer_client="auto")
