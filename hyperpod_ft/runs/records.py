"""The record of a finished stage."""

import calendar
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, TypeAdapter

from hyperpod_ft import publish
from hyperpod_ft.data.images import FILES as IMAGES
from hyperpod_ft.digests import file_sha256, files_below


def _of_the_calendar(text: str) -> str:
    # raises ValueError for the 31st of February, and for the year 0; strptime took a third of the time of `list`
    datetime.fromisoformat(text.removesuffix("Z"))
    return text


ISO_UTC = "%Y-%m-%dT%H:%M:%SZ"
ISO_UTC_PATTERN = r"\d{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12]\d|3[01])T(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\dZ"
# A time in a run's files. A file with a malformed time counts as damaged.
UtcTime = Annotated[str, Field(pattern=f"^{ISO_UTC_PATTERN}$"), AfterValidator(_of_the_calendar)]
CARD = "README.md"  # of a model; the one output that may change: its owner edits it, and stage eval adds scores


@dataclass(frozen=True)
class Output:
    """One file that a stage left: its path relative to `cluster.root`, size in bytes, and SHA-256.

    The digest is empty where nothing checks it: hashing a model takes longer than writing it.
    """

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Record:
    """The record that a stage writes when it has finished: the only proof that it did."""

    stage: str
    fingerprint: str
    inputs: dict[str, str]  # fingerprints of the stages it needed
    outputs: tuple[Output, ...]
    facts: dict[str, Any]  # what the stage reports: rows, tokens, losses
    started: UtcTime
    seconds: float
    host: str
    job_id: str
    versions: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "Record | None":
        """The record at `path`; None when it is missing or damaged."""
        try:
            return cls.parse(path.read_bytes())
        except OSError:
            return None

    @classmethod
    def parse(cls, content: bytes) -> "Record | None":
        """The record in a file's content; None when it is damaged."""
        try:
            return _RECORD.validate_json(content)
        except ValueError:
            return None

    def write(self, path: Path) -> None:
        publish.write_json(path, asdict(self))


_RECORD = TypeAdapter(Record)


def utc_now() -> str:
    """The time as records give it: ISO 8601, UTC, whole seconds."""
    return time.strftime(ISO_UTC, time.gmtime())


def unix_time(text: str) -> float:
    """Of a time in a run's files: ISO 8601, UTC, whole seconds."""
    return float(calendar.timegm(time.strptime(text, ISO_UTC)))


def outputs_of(root: Path, paths: Iterable[Path], *, digests: bool = True) -> tuple[Output, ...]:
    """Outputs for a record: every file at or below `paths`, with its size and, unless `digests` is off, SHA-256."""
    files = [file for path in paths for file in files_below(path)]
    digested = {file for file in files if digests and file.name != IMAGES}  # each image is checked when it is read
    return tuple(
        Output(file.relative_to(root).as_posix(), file.stat().st_size, file_sha256(file) if file in digested else "")
        for file in files
    )
