"""Trees in S3, on moto's: pushed and pulled whole, again after a kill at any step, and no more than what differs."""

import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from awscrt.s3 import S3ResponseError
from boto3.exceptions import RetriesExceededError, S3UploadFailedError
from botocore.exceptions import ClientError

from hyperpod_ft.aws.s3 import crt, trees, worker_processes
from hyperpod_ft.aws.s3.download import RANGE_BYTES, ObjectReplacedError
from hyperpod_ft.aws.s3.listing import DIGEST
from hyperpod_ft.aws.s3.location import Location
from hyperpod_ft.aws.s3.upload import PART_BYTES, part_bytes
from hyperpod_ft.digests import file_xxh3, files_below
from hyperpod_ft.errors import UserError
from tests.aws.conftest import Aws
from tests.aws.killing import killed
from tests.unit.stage_runs import tree

URL = "s3://bucket/a/prefix"
# one request, several parts, several parts and several ranges
LARGE = {"model/b.bin": PART_BYTES + 1, "model/c.bin": RANGE_BYTES + 12_345}
FILES = {"model/config.json": 10, "model/deep/er/empty": 0, "records/r.json": 100} | LARGE


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, size in FILES.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(size))
    return tmp_path / "root"


def wrapped() -> Exception:
    """What boto3 makes of S3's answer to an upload."""
    try:
        try:
            raise ClientError({"Error": {"Code": "AccessDenied", "Message": "no"}}, "PutObject")
        except ClientError as error:
            raise S3UploadFailedError("Failed to upload") from error
    except S3UploadFailedError as error:
        return error


def put(client: Any, name: str, content: bytes) -> None:
    client.put_object(Bucket="bucket", Key=f"a/prefix/{name}", Body=content)


def requests(aws: Aws, operation: str) -> int:
    return sum(found == operation for _, found in aws.requests())


def test_a_tree_is_pushed_and_pulled_whole(client: Any, root: Path, tmp_path: Path) -> None:
    put(client, "other/file", b"theirs")
    client.put_object(Bucket="bucket", Key="a/prefix-2/file", Body=b"theirs")
    trees.push(client, URL, root, files_below(root))
    assert [(entry.name, entry.size) for entry in trees.listing(client, URL, "model")] == sorted(
        (name, size) for name, size in FILES.items() if name.startswith("model/")
    )
    for name in FILES:
        answer = client.head_object(Bucket="bucket", Key=f"a/prefix/{name}")
        assert answer["Metadata"] == {DIGEST: file_xxh3(root / name)}
    trees.pull(client, URL, tmp_path / "copy")
    assert tree(tmp_path / "copy") == tree(root) | {"other/file": b"theirs"}


def test_what_is_there_is_skipped(client: Any, root: Path, tmp_path: Path, aws: Aws) -> None:
    trees.push(client, URL, root, files_below(root))
    (root / "records/r.json").write_bytes(b"x" * 100)  # of the same size
    sent = requests(aws, "PUT") + requests(aws, "POST")
    trees.push(client, URL, root, files_below(root))
    assert requests(aws, "PUT") + requests(aws, "POST") == sent + 1
    trees.pull(client, URL, tmp_path / "copy")
    before = {path: path.stat().st_ino for path in files_below(tmp_path / "copy")}
    (tmp_path / "copy/model/config.json").write_bytes(b"y" * 10)
    trees.pull(client, URL, tmp_path / "copy")
    after = {path: path.stat().st_ino for path in files_below(tmp_path / "copy")}
    assert {path.name for path in after if after[path] != before[path]} == {"config.json"}
    assert tree(tmp_path / "copy") == tree(root)


def test_objects_of_other_tools(client: Any, tmp_path: Path) -> None:
    """Without a digest, a newer file of the same size is taken for a copy, as the download stage does."""
    put(client, "old", b"1234")
    put(client, "new", b"1234")
    for name, time in (("old", 0), ("new", 4_000_000_000)):
        (tmp_path / name).write_bytes(b"abcd")
        os.utime(tmp_path / name, (time, time))
    trees.pull(client, URL, tmp_path)
    assert tree(tmp_path) == {"old": b"1234", "new": b"abcd"}


def test_a_damaged_object_is_refused(client: Any, tmp_path: Path) -> None:
    client.put_object(Bucket="bucket", Key="a/prefix/f", Body=b"damaged", Metadata={DIGEST: "0" * 32})
    with pytest.raises(UserError, match="a/prefix/f: its digest differs"):
        trees.pull(client, URL, tmp_path)
    assert tree(tmp_path) == {}


def test_names_that_are_missing_or_outside(client: Any, tmp_path: Path) -> None:
    put(client, "a/../../../escaped", b"x")
    put(client, "fine", b"x")
    with pytest.raises(UserError, match=r"has a file named 'a/\.\./"):
        trees.pull(client, URL, tmp_path / "root")
    with pytest.raises(UserError, match="prefix/there: is missing"):
        trees.pull_named(client, URL, tmp_path / "root", ["fine", "there"])
    assert tree(tmp_path) == {}


def test_a_file_that_changes_during_the_push(client: Any, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = root / "model/c.bin"
    upload_part = client.upload_part

    def change(**arguments: Any) -> Any:
        os.utime(path)
        return upload_part(**arguments)

    monkeypatch.setattr(client, "upload_part", change)
    with pytest.raises(UserError, match=r"c\.bin: changed while it was uploaded"):
        trees.push(client, URL, root, [path])
    assert trees.listing(client, URL) == []
    assert "Uploads" not in client.list_multipart_uploads(Bucket="bucket")


def test_errors_are_one_line(client: Any, root: Path) -> None:
    with pytest.raises(UserError, match=r"cannot write s3://none/a: .*NoSuchBucket; correct the bucket"):
        trees.push(client, "s3://none/a", root, files_below(root))
    with pytest.raises(UserError, match=r"cannot read s3://none/a: .*NoSuchBucket; correct the bucket"):
        trees.pull(client, "s3://none/a", root)


@pytest.mark.parametrize("operation", ["put_object", "create_multipart_upload", "upload_part", "get_object"])
def test_errors_of_one_request_end_all(
    client: Any, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    trees.push(client, f"{URL}/before", root, files_below(root))

    def fail(**_: Any) -> Any:
        raise ClientError({"Error": {"Code": "SlowDown", "Message": ""}}, operation)

    with monkeypatch.context() as patched:
        patched.setattr(client, operation, fail)
        with pytest.raises(UserError, match="throttled"):
            trees.push(client, URL, root, files_below(root))
            trees.pull(client, f"{URL}/before", tmp_path / "copy")
    assert "Uploads" not in client.list_multipart_uploads(Bucket="bucket")
    trees.push(client, URL, root, files_below(root))
    trees.pull(client, f"{URL}/before", tmp_path / "copy")
    assert tree(tmp_path / "copy") == tree(root)


@pytest.mark.parametrize(
    ("operation", "count"),
    [("PutObject", 2), ("CreateMultipartUpload", 1), ("UploadPart", 3), ("CompleteMultipartUpload", 1)],
)
def test_a_killed_push_leaves_only_whole_objects(
    client: Any, root: Path, tmp_path: Path, operation: str, count: int
) -> None:
    assert killed(lambda own: trees.push(own, URL, root, files_below(root)), count, operation)
    found = trees.listing(client, URL)
    assert len(found) < len(FILES)
    assert {entry.name: entry.size for entry in found}.items() <= FILES.items()
    trees.push(client, URL, root, files_below(root))
    trees.pull(client, URL, tmp_path / "copy")
    assert tree(tmp_path / "copy") == tree(root)


@pytest.mark.parametrize("count", [1, 3, 5])
def test_a_killed_pull_leaves_only_whole_files(client: Any, root: Path, tmp_path: Path, count: int) -> None:
    trees.push(client, URL, root, files_below(root))
    copy, whole = tmp_path / "copy", tree(root)
    assert killed(lambda own: trees.pull(own, URL, copy), count, "GetObject")
    left = tree(copy)
    assert any(name.endswith(".partial") for name in left)
    assert {name: content for name, content in left.items() if not name.endswith(".partial")}.items() <= whole.items()
    trees.pull(client, URL, copy)
    assert tree(copy) == whole


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three processes, however little there is to transfer, and however many processors there are."""
    monkeypatch.setattr(worker_processes, "_processes", lambda sizes: min(3, len(sizes)))


@pytest.mark.usefixtures("processes")
def test_several_processes(client: Any, root: Path, tmp_path: Path) -> None:
    trees.push(client, URL, root, files_below(root))
    received: list[int] = []
    trees.pull_entries(client, URL, tmp_path / "copy", trees.listing(client, URL), received.append)
    assert tree(tmp_path / "copy") == tree(root)
    assert sum(received) == sum(FILES.values())


@pytest.mark.usefixtures("processes")
def test_an_error_in_one_process_ends_all(
    client: Any, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"cannot write s3://none/a: .*NoSuchBucket; correct the bucket"):
        trees.push(client, "s3://none/a", root, files_below(root))
    trees.push(client, URL, root, files_below(root))
    get_object = client.get_object

    def fail(**arguments: Any) -> Any:
        if arguments["Key"].endswith("b.bin"):
            raise ClientError({"Error": {"Code": "SlowDown", "Message": ""}}, "GetObject")
        return get_object(**arguments)

    with monkeypatch.context() as patched:
        patched.setattr(client, "get_object", fail)
        with pytest.raises(UserError, match="throttled"):
            trees.pull(client, URL, tmp_path / "copy")
        patched.setattr(client, "get_object", lambda **_: os.kill(os.getpid(), signal.SIGKILL))
        with pytest.raises(RuntimeError, match="ended with exit status -9"):
            trees.pull(client, URL, tmp_path / "copy")
    assert os.waitpid(-1, os.WNOHANG) == (0, 0)  # the server is still there, and no process has been left
    trees.pull(client, URL, tmp_path / "copy")
    assert tree(tmp_path / "copy") == tree(root)


def test_shares_cost_about_the_same() -> None:
    sizes = [5 << 20, 4 << 20, 3 << 20, 2 << 20, 10, 10]
    assert worker_processes.divided(sizes, lambda size: size, 2) == [[5 << 20, 2 << 20, 10], [4 << 20, 3 << 20, 10]]
    assert worker_processes.divided([1], lambda size: size, 4) == [[1]]


def test_two_pulls_at_once(client: Any, root: Path, tmp_path: Path) -> None:
    trees.push(client, URL, root, files_below(root))
    with ThreadPoolExecutor() as pool:
        both = [pool.submit(trees.pull, client, URL, tmp_path / "copy") for _ in range(2)]
        assert [one.result() for one in both] == [None, None]
    assert tree(tmp_path / "copy") == tree(root)


@pytest.mark.usefixtures("processes")
def test_the_native_client_where_boto3_chooses_it(
    client: Any, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here boto3 falls back on its Python transfer, with the same calls: the native one needs an endpoint of AWS."""
    monkeypatch.setattr(crt, "is_used", lambda _: True)
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("it does not survive a fork"))
    trees.push(client, URL, root, files_below(root))
    assert client.head_object(Bucket="bucket", Key="a/prefix/model/c.bin")["Metadata"] == {
        DIGEST: file_xxh3(root / "model/c.bin")
    }
    trees.pull(client, URL, tmp_path / "copy")
    assert tree(tmp_path / "copy") == tree(root)


@pytest.mark.parametrize(
    ("failure", "problem"),
    [
        (S3ResponseError(code=14343, name="AWS_ERROR_S3_INVALID", message="slow down"), "native S3 client.*slow down"),
        (RetriesExceededError(ConnectionError("gone")), "native S3 client failed"),
        (wrapped(), r"cannot (read|write) s3://bucket/a/prefix: .*AccessDenied"),
    ],
)
def test_errors_of_the_native_client(
    client: Any, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception, problem: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise failure

    trees.push(client, URL, root, files_below(root))
    monkeypatch.setattr(crt, "is_used", lambda _: True)
    for name in ("upload_file", "download_file"):
        monkeypatch.setattr(client, name, fail)
    with pytest.raises(UserError, match=problem):
        trees.pull(client, URL, tmp_path / "copy")
    (root / "model/c.bin").write_bytes(os.urandom(RANGE_BYTES + 1))
    with pytest.raises(UserError, match=problem):
        trees.push(client, URL, root, files_below(root))


def test_a_file_that_changes_while_the_native_client_reads_it(
    client: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crt, "is_used", lambda _: True)
    monkeypatch.setattr(client, "upload_file", lambda path, *_, **__: os.utime(path))
    with pytest.raises(UserError, match="changed while it was uploaded"):
        trees.push(client, URL, root, [root / "model/c.bin"])


def test_an_object_that_is_replaced_before_the_native_client_reads_it(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a recorded digest too, the new content does not get the old entry's name."""
    put(client, "f", os.urandom(RANGE_BYTES + 1))
    download_file = client.download_file

    def replace(*place: str, **arguments: Any) -> None:
        put(client, "f", os.urandom(RANGE_BYTES + 1))
        download_file(*place, **arguments)

    monkeypatch.setattr(crt, "is_used", lambda _: True)
    monkeypatch.setattr(client, "download_file", replace)
    with pytest.raises(ObjectReplacedError, match="f: was replaced while it was read"):
        trees.pull(client, URL, tmp_path)
    assert tree(tmp_path) == {}


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
    fast = SimpleNamespace(is_optimized_for_system=lambda: True)
    monkeypatch.setitem(sys.modules, "awscrt", SimpleNamespace(s3=fast))
    monkeypatch.setitem(sys.modules, "awscrt.s3", fast)
    assert crt.is_used(SimpleNamespace(meta=SimpleNamespace(endpoint_url=endpoint))) == used
    fast.is_optimized_for_system = lambda: False
    assert not crt.is_used(SimpleNamespace(meta=SimpleNamespace(endpoint_url=endpoint)))
    monkeypatch.setitem(sys.modules, "awscrt.s3", None)
    assert not crt.is_used(SimpleNamespace(meta=SimpleNamespace(endpoint_url=endpoint)))


def test_part_sizes() -> None:
    assert part_bytes(1) == part_bytes(10_000 * PART_BYTES) == PART_BYTES
    largest = 50 << 40
    assert -(-largest // part_bytes(largest)) <= 10_000
    assert part_bytes(10_000 * PART_BYTES + 1) == PART_BYTES + (1 << 20)


def test_locations() -> None:
    assert str(Location.of("s3://bucket/a/b/")) == "s3://bucket/a/b"
    assert Location.of("s3://bucket").name("a/b") == "a/b"
    assert Location.of("s3://bucket/llama").name("llama-2/a") == ""
    assert Location.of("s3://bucket/llama").name("llama/") == ""
    assert Location.of("s3://bucket/llama/a.json").name("llama/a.json") == "a.json"
