"""An S3 URL, and which objects below it are which files."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from hyperpod_ft.aws.session import explained
from hyperpod_ft.errors import UserError


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
