"""Trees in S3, on moto's: pushed and pulled whole, again after a kill at any step, and no more than what differs."""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError, ResponseStreamingError

from hyperpod_ft import publish
from hyperpod_ft.aws.s3 import transfers, trees
from hyperpod_ft.aws.s3.objects import DIGEST, Location, ObjectReplacedError
from hyperpod_ft.aws.s3.transfers import LARGE_BYTES, LEFTOVER
from hyperpod_ft.digests import file_xxh3, files_below
from hyperpod_ft.errors import UserError
from tests.aws.conftest import Aws
from tests.aws.killing import killed
from tests.unit.stage_runs import tree

URL = "s3://bucket/a/prefix"
# in one part, in several
LARGE = {"model/b.bin": LARGE_BYTES, "model/c.bin": 2 * LARGE_BYTES + 12_345}
FILES = {"model/config.json": 10, "model/deep/er/empty": 0, "records/r.json": 100} | LARGE


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, size in FILES.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(size))
    return tmp_path / "root"


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
    received: list[int] = []
    trees.pull_entries(client, URL, tmp_path / "copy", trees.listing(client, URL), received.append)
    assert sum(received) == sum(FILES.values()), "every byte is progress"
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
    for name, modified in (("old", 0), ("new", 4_000_000_000)):
        (tmp_path / name).write_bytes(b"abcd")
        os.utime(tmp_path / name, (modified, modified))
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


def test_errors_of_one_request_end_all(
    client: Any, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def push(url: str) -> None:
        trees.push(client, url, root, files_below(root))

    def pull(url: str) -> None:
        trees.pull(client, url, tmp_path / "copy")

    def ends_with_an_error_of(operation: str, transfer: Callable[[str], None], url: str) -> None:
        def fail(**_: Any) -> Any:
            raise ClientError({"Error": {"Code": "SlowDown", "Message": ""}}, operation)

        with monkeypatch.context() as patched:
            patched.setattr(client, operation, fail)
            with pytest.raises(UserError, match="throttled"):
                transfer(url)
        assert "Uploads" not in client.list_multipart_uploads(Bucket="bucket")

    for operation in ("put_object", "create_multipart_upload", "upload_part"):
        ends_with_an_error_of(operation, push, f"{URL}/{operation}")
    push(f"{URL}/{operation}")
    ends_with_an_error_of("get_object", pull, f"{URL}/{operation}")
    pull(f"{URL}/{operation}")
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
    assert {name: content for name, content in left.items() if LEFTOVER not in name}.items() <= whole.items()
    for name in FILES:
        publish.write_text(copy / Path(name).with_name(f".{Path(name).name}{LEFTOVER}0123"), "half")
    trees.pull(client, URL, copy)
    assert tree(copy) == whole


@pytest.mark.parametrize("operation", ["PutObject", "UploadPart", "GetObject"])
def test_an_interrupt_ends_at_once(
    client: Any, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    """However much is left: 100 small files, or 32 parts; and there is neither half a file nor an object of one.

    No more is sent than what has begun, ten requests at a time, and none of these is tried again.
    """
    if operation == "UploadPart":
        os.truncate(root / "model/c.bin", 64 * LARGE_BYTES)
        files = [root / "model/c.bin"]
    else:
        files = [root / f"small-{number}" for number in range(100)]
        for path in files:
            path.write_bytes(b"x" * 100)
    if operation == "GetObject":
        trees.push(client, URL, root, files)
    started, interrupted, begun = threading.Event(), threading.Event(), list[None]()

    def count(**_: Any) -> None:
        begun.append(None)

    def slow(**_: Any) -> None:
        started.set()
        interrupted.wait(300)
        time.sleep(0.5)  # the interrupt reaches the other threads meanwhile

    def interrupt(*_: Any) -> None:
        started.wait(300)
        interrupted.set()
        raise KeyboardInterrupt

    monkeypatch.setattr(transfers, "as_completed", interrupt)
    hooks = {f"request-created.s3.{operation}": count, f"before-send.s3.{operation}": slow}
    for event, hook in hooks.items():
        client.meta.events.register(event, hook)
    with pytest.raises(KeyboardInterrupt):
        if operation == "GetObject":
            trees.pull(client, URL, tmp_path / "copy")
        else:
            trees.push(client, URL, root, files)
    for event, hook in hooks.items():
        client.meta.events.unregister(event, hook)
    assert len(begun) < 25
    assert "Uploads" not in client.list_multipart_uploads(Bucket="bucket")
    if operation == "GetObject":
        assert not any(LEFTOVER in name for name in tree(tmp_path / "copy"))
    else:
        assert len(trees.listing(client, URL)) < len(files)


@pytest.mark.parametrize("size", [100, 2 * LARGE_BYTES + 1])
def test_a_connection_that_breaks(client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Once: it is read again. Always: one line."""
    content, get_object, broken = os.urandom(size), client.get_object, [True]
    put(client, "f", content)

    def broken_get(**arguments: Any) -> Any:
        answer = get_object(**arguments)
        if broken:
            broken.pop()
            answer["Body"].read = broken_read
        return answer

    def broken_read(*_: Any) -> bytes:
        raise ResponseStreamingError(error="reset")

    monkeypatch.setattr(client, "get_object", broken_get)
    trees.pull(client, URL, tmp_path / "copy")
    assert (tmp_path / "copy/f").read_bytes() == content
    broken.extend([True] * 100)
    with pytest.raises(UserError, match=r"f: the transfer failed \(ResponseStreamingError.*; check the network"):
        trees.pull(client, URL, tmp_path / "again")
    assert tree(tmp_path / "again") == {}


def test_two_pulls_at_once(client: Any, root: Path, tmp_path: Path) -> None:
    trees.push(client, URL, root, files_below(root))
    with ThreadPoolExecutor() as pool:
        both = [pool.submit(trees.pull, client, URL, tmp_path / "copy") for _ in range(2)]
        assert [one.result() for one in both] == [None, None]
    assert tree(tmp_path / "copy") == tree(root)


@pytest.mark.parametrize("size", [100, LARGE_BYTES - 1, 2 * LARGE_BYTES + 1])
def test_an_object_that_is_replaced_while_it_is_read(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Without a recorded digest too, the new content does not get the old entry's name."""
    put(client, "f", os.urandom(size))
    get_object, first = client.get_object, threading.Lock()

    def replace(**arguments: Any) -> Any:
        if first.acquire(blocking=False):
            put(client, "f", os.urandom(size))
        return get_object(**arguments)

    monkeypatch.setattr(client, "get_object", replace)
    with pytest.raises(ObjectReplacedError, match="f: was replaced while it was read"):
        trees.pull(client, URL, tmp_path)
    assert tree(tmp_path) == {}


def test_locations() -> None:
    assert str(Location.of("s3://bucket/a/b/")) == "s3://bucket/a/b"
    assert Location.of("s3://bucket").name("a/b") == "a/b"
    assert Location.of("s3://bucket/llama").name("llama-2/a") == ""
    assert Location.of("s3://bucket/llama").name("llama/") == ""
    assert Location.of("s3://bucket/llama/a.json").name("llama/a.json") == "a.json"
