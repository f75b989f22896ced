"""A location in S3 and its objects: which there are, the content of small ones, and removing them.

`client` is boto3's for s3 throughout. Names are relative to the location, as in trees.py.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Literal

from hyperpod_ft.aws.session import answer_or_none, explained
from hyperpod_ft.errors import UserError

DIGEST = "xxh3-128"  # the key of an object's metadata that holds the XXH3 (128 bits) of its content, as hex


@dataclass(frozen=True)
class Location:
    """`s3://bucket/prefix`, a directory of objects; an empty prefix is the whole bucket."""

    bucket: str
    prefix: str  # without slashes at its ends

    @classmethod
    def of(cls, url: str) -> "Location":
        bucket, _, prefix = url.removeprefix("s3://").partition("/")
        return cls(bucket, prefix.strip("/"))

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def key(self, name: str) -> str:
        """The key of a file, by its name relative to this location."""
        return f"{self.prefix}/{name}" if self.prefix else name

    def name(self, key: str) -> str:
        """An object's name relative to this location; empty for one that is not below it, or not a file.

        `llama-2` is not below `llama`. An object at the location itself is a file of the key's last part.
        """
        if key.endswith("/"):
            return ""  # a console's "folder"
        if key == self.prefix:
            return key.rpartition("/")[2]
        if not self.prefix:
            return key
        return key.removeprefix(f"{self.prefix}/") if key.startswith(f"{self.prefix}/") else ""


def check_name(where: str, name: str) -> None:
    """Raise UserError for a name that would be outside its directory: keys may be any text."""
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts) or any(ord(character) < 32 for character in name):
        raise UserError(f"{where}: the source has a file named {name!r}", "rename or remove it")


def parent_of(name: str) -> str:
    """The directory of a file, relative as the name is; empty at the top."""
    parent = str(PurePosixPath(name).parent)
    return "" if parent == "." else parent


_ACTIONS = {"read": "s3:GetObject", "write": "s3:PutObject", "remove": "s3:DeleteObject"}


class ObjectReplacedError(UserError):
    """An object was replaced after it was listed."""


def explained_s3(url: str, verb: Literal["read", "write", "remove"]) -> AbstractContextManager[None]:
    """Turn botocore's errors into UserError that say what could not be done with `url`, and what to do."""
    allow = f"grant these credentials s3:ListBucket and {_ACTIONS[verb]}"
    remedies = {
        "NoSuchBucket": "correct the bucket's name",
        "AccessDenied": allow,
        "403": allow,  # of a HEAD request, whose response has no body
        "AllAccessDisabled": allow,
    }
    return explained(f"cannot {verb} {url}", remedies)


@dataclass(frozen=True)
class Entry:
    """One object: its name relative to the location, and what S3 lists of it."""

    name: str
    key: str
    size: int
    etag: str  # changes with the content
    modified: float  # seconds since 1970


def entries(client: Any, location: Location, below: str = "") -> list[Entry]:
    """Every file at or below a name of the location, sorted by name. Raises botocore's errors."""
    prefix = location.key(below) if below else location.prefix
    found = [
        entry
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=location.bucket, Prefix=prefix)
        for entry in _entries(location, page)
        if not below or entry.name == below or entry.name.startswith(f"{below.rstrip('/')}/")
    ]
    return sorted(found, key=lambda entry: entry.name)


def entries_named(client: Any, location: Location, names: Iterable[str]) -> dict[str, Entry]:
    """The objects of these names, by name, with a request for each directory rather than for each file."""
    wanted = set(names)
    found: dict[str, Entry] = {}
    for parent in sorted({parent_of(name) for name in wanted}):
        prefix = f"{location.key(parent)}/".lstrip("/") if parent else location.key("")
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=location.bucket, Prefix=prefix, Delimiter="/")
        found |= {entry.name: entry for page in pages for entry in _entries(location, page) if entry.name in wanted}
    return found


def exists(client: Any, location: Location, name: str) -> bool:
    """Whether an object of this name is there. Raises botocore's errors."""
    absent = ("404", "NoSuchKey", "NoSuchBucket", "NotFound")
    return answer_or_none(client.head_object, *absent, Bucket=location.bucket, Key=location.key(name)) is not None


def digest_of(client: Any, bucket: str, entry: Entry) -> str:
    """The digest in an object's metadata; empty if it was not written by `push`."""
    answer = client.head_object(Bucket=bucket, Key=entry.key)
    return str(answer["Metadata"].get(DIGEST, ""))


def _entries(location: Location, page: Any) -> Iterator[Entry]:
    for listed in page.get("Contents", []):
        if name := location.name(listed["Key"]):
            yield Entry(name, listed["Key"], listed["Size"], listed["ETag"], listed["LastModified"].timestamp())


_MAX_KEYS = 1000  # of one DeleteObjects


def read(client: Any, url: str, name: str) -> bytes | None:
    """The content of an object, or None if it does not exist."""
    location = Location.of(url)
    with explained_s3(url, "read"):
        answer = answer_or_none(client.get_object, "NoSuchKey", Bucket=location.bucket, Key=location.key(name))
        content: bytes | None = answer["Body"].read() if answer else None
    return content


def write(client: Any, url: str, name: str, content: bytes) -> None:
    location = Location.of(url)
    with explained_s3(url, "write"):
        client.put_object(Bucket=location.bucket, Key=location.key(name), Body=content)


def remove(client: Any, url: str, names: Iterable[str]) -> None:
    """Remove objects, those that exist. Raises UserError when one is left."""
    location = Location.of(url)
    keys = [{"Key": location.key(name)} for name in names]
    with explained_s3(url, "remove"):
        for begin in range(0, len(keys), _MAX_KEYS):
            some = {"Objects": keys[begin : begin + _MAX_KEYS], "Quiet": True}
            for failed in client.delete_objects(Bucket=location.bucket, Delete=some).get("Errors", []):
                raise UserError(
                    f"cannot remove s3://{location.bucket}/{failed['Key']} ({failed['Code']})",
                    f"grant these credentials {_ACTIONS['remove']}",
                )
