"""AWS's native client, which boto3 takes by itself on large instance types: its errors (a stand-in), its endpoints."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3.s3.transfer
import pytest
from awscrt.s3 import S3ResponseError
from botocore.exceptions import ClientError

from hyperpod_ft.aws.s3 import transfers, trees
from hyperpod_ft.aws.s3.transfers import LARGE_BYTES
from hyperpod_ft.digests import files_below
from hyperpod_ft.errors import UserError

URL = "s3://bucket/a/prefix"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A tree with one file in several parts."""
    path = tmp_path / "root" / "model/c.bin"
    path.parent.mkdir(parents=True)
    path.write_bytes(os.urandom(2 * LARGE_BYTES + 12_345))
    return tmp_path / "root"


class Native:
    """Fails as the manager of AWS's native client does."""

    def __init__(self, failure: Exception | None) -> None:
        self.failure = failure

    def __enter__(self) -> "Native":
        return self

    def __exit__(self, *_: object) -> None: ...

    def upload(self, path: str, *_: Any) -> Any:
        os.utime(path)
        return self.download("", "", path, {}, _[-1])

    def download(self, _bucket: str, _key: str, path: str, extra: dict[str, str], following: list[Any]) -> Any:
        following[0].on_queued(SimpleNamespace(meta=SimpleNamespace(call_args=SimpleNamespace(extra_args=extra))))
        following[0].on_done()
        return self

    def result(self) -> None:
        if self.failure:
            raise self.failure


@pytest.mark.parametrize(
    ("failure", "problem"),
    [
        (S3ResponseError(code=14343, name="AWS_ERROR_S3_INVALID", message="slow down"), "transfer failed .*slow down"),
        (
            ClientError({"Error": {"Code": "AccessDenied", "Message": "no"}}, "PutObject"),
            r"cannot (read|write) s3://bucket/a/prefix: .*AccessDenied",
        ),
    ],
)
def test_errors_of_the_native_client(
    client: Any, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception, problem: str
) -> None:
    trees.push(client, URL, root, files_below(root))
    monkeypatch.setattr(transfers, "_manager", lambda _: Native(failure))
    with pytest.raises(UserError, match=problem):
        trees.pull(client, URL, tmp_path / "copy")
    (root / "model/c.bin").write_bytes(os.urandom(LARGE_BYTES))
    with pytest.raises(UserError, match=problem):
        trees.push(client, URL, root, files_below(root))


def test_a_file_that_changes_while_the_native_client_reads_it(
    client: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "_manager", lambda _: Native(None))
    with pytest.raises(UserError, match="changed while it was uploaded"):
        trees.push(client, URL, root, [root / "model/c.bin"])


@pytest.mark.parametrize(
    ("endpoint", "used"),
    [
        ("https://s3.us-west-2.amazonaws.com", True),
        ("https://s3.cn-north-1.amazonaws.com.cn", True),
        ("https://s3.us-west-2.amazonaws.com:443", False),
        ("http://127.0.0.1:9000", False),
        ("https://storage.example.com", False),
    ],
)
def test_the_native_client_is_for_endpoints_of_aws(endpoint: str, used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """There boto3 chooses by itself."""
    chosen: list[Any] = []
    monkeypatch.setattr(boto3.s3.transfer, "create_transfer_manager", lambda _, config: chosen.append(config))
    transfers._manager(SimpleNamespace(meta=SimpleNamespace(endpoint_url=endpoint)))
    assert [config.preferred_transfer_client for config in chosen] == ["auto" if used else "classic"]
