"""An S3 URL, and which objects below it are which files."""

from dataclasses import dataclass
from pathlib import PurePosixPath

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
