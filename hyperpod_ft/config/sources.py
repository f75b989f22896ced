"""Where a model or dataset comes from: the Hub, S3, a local path, or the kit's own examples."""

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hyperpod_ft.config.fields import shortened, shown
from hyperpod_ft.digests import file_sha256, files_below, text_sha256
from hyperpod_ft.errors import UserError
from hyperpod_ft.shipped import shipped

SourceKind = Literal["hub", "s3", "local"]

EXAMPLES = {
    "tiny-llama": "quickstart/tiny-llama",
    "tiny-teacher": "quickstart/tiny-teacher",
    "qa": "quickstart/qa.jsonl",
    "feedback": "quickstart/feedback.jsonl",
    "preferences": "quickstart/preferences.jsonl",
    "requests": "quickstart/requests.jsonl",
    "tiny-qwen3-vl": "pictures/tiny-qwen3-vl",
    "pictures": "pictures/colors",
}

# The Hub's own rule: `name` or `organisation/name`, at most 96 characters.
_HUB_ID = re.compile(r"^(?=.{1,96}$)[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$", re.ASCII)
_S3_URI = re.compile(r"^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^\x00-\x1f]*)?$")
SMALL_FILE_BYTES = 16 << 20


@dataclass(frozen=True)
class Asset:
    """A source pinned to one content. `revision` is the Hub's, or a digest of local files; empty for S3."""

    source: str
    revision: str

    @property
    def kind(self) -> SourceKind:
        return kind_of(self.source)

    @property
    def short_name(self) -> str:
        """The Hub's id, or the last part of a path or URI."""
        return self.source if self.kind == "hub" else self.source.rstrip("/").rsplit("/", 1)[-1]

    @property
    def pinned(self) -> str:
        """The source, and the revision if there is one."""
        return f"{self.source} @ {self.revision}" if self.revision else self.source

    @property
    def slug(self) -> str:
        """A directory name made of source and revision, for example `meta-llama--Meta-Llama-3-8B@8cde5ca…`."""
        name = self.short_name.replace("/", "--")
        revision = self.revision or text_sha256(self.source)[:12]
        return re.sub(r"[^A-Za-z0-9._-]", "-", name) + "@" + re.sub(r"[^A-Za-z0-9._-]", "-", revision)


def kind_of(source: str) -> SourceKind:
    if source.startswith("s3://"):
        return "s3"
    return "local" if source.startswith(("/", ".", "~")) else "hub"


def beside(where: str, key: str) -> str:
    """The key beside a key `source`, both as errors name them; what is no such key, as an option, is itself."""
    return f"{where.removesuffix('source')}{key}" if where.endswith("source") else where


def names_one_file(source: str) -> bool:
    """Whether it ends like a file of rows, not like a directory or a Hub id."""
    return source.endswith((".jsonl", ".json", ".parquet"))


def resolve(where: str, source: str, revision: str | None, base: Path) -> Asset:
    """Pin the source in a run file. `where` names the key in errors; relative paths are relative to `base`.

    Raises UserError unless it is a Hub id, an S3 URI or an existing path, whose content must then match `revision`.
    """
    if source.startswith("example:"):
        source = str(_example(where, source))
    kind = kind_of(source)
    if kind == "hub":
        if names_one_file(source) or exists(base / source):
            raise UserError(
                f"{where}: {shown(source)} would be read as a Hub id",
                f"start a local path with ./ or /: ./{shortened(source)}",
            )
        if not _HUB_ID.match(source) or ".." in source:
            raise UserError(
                f"{where}: {shown(source)} is not a Hub id, s3:// URI or path",
                "write a local path as /path or ./path",
            )
        return Asset(source, revision or "main")
    revision_key = beside(where, "revision")
    if kind == "s3":
        if revision is not None:
            raise UserError(f"{revision_key}: an S3 URI has no revision", "remove the key")
        if not _S3_URI.match(source):
            raise UserError(f"{where}: {shown(source)} is not an S3 URI", "write it as s3://bucket/prefix")
        return Asset(source, "")
    return resolve_path(where, source, revision_key, revision, base)


def resolve_path(
    where: str, source: str, revision_key: str, revision: str | None, base: Path, copy: Path | None = None
) -> Asset:
    """Pin a local file or directory, likewise. `revision_key` names the key that has its digest.

    `copy`: a copy of the file, of the same name and time, whose digest is meant.
    """
    path = (base / Path(source).expanduser()).resolve()
    if not exists(path):
        raise UserError(f"{where}: no such file or directory: {shortened(str(path))}", "correct the path")
    digest = "local-" + _digest(copy or path)
    if revision not in (None, digest):
        raise UserError(f"{revision_key}: {path} is {digest}, not {revision}", "remove the key, or restore the files")
    return Asset(str(path), digest)


def exists(path: Path) -> bool:
    """Whether a path that a user gave exists. False, not OSError, if its name is too long or a directory unreadable."""
    try:
        return path.exists()
    except OSError:
        return False


def _example(where: str, source: str) -> Path:
    name = source.removeprefix("example:")
    if name not in EXAMPLES:
        raise UserError(f"{where}: there is no example {shown(name)}", f"known: {', '.join(sorted(EXAMPLES))}")
    return shipped("examples") / EXAMPLES[name]


def _digest(path: Path) -> str:
    # Small files by content, so that a fresh checkout of the same data has the same digest; large ones by size and
    # time, so that planning stays fast.
    digest = hashlib.sha256()
    for file in files_below(path):
        status = file.stat()
        small = status.st_size <= SMALL_FILE_BYTES
        identity = file_sha256(file) if small else f"{status.st_size} {status.st_mtime_ns}"
        name = file.name if file == path else file.relative_to(path).as_posix()
        digest.update(os.fsencode(name) + f"\0{identity}\n".encode())
    return digest.hexdigest()[:16]
