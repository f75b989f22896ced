"""The record of a finished stage."""

import calendar
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from hyperpod_ft import publish
from hyperpod_ft.data.images import FILES as IMAGES
from hyperpod_ft.digests import file_sha256, file_xxh3, files_below, text_sha256


def _of_the_calendar(text: str) -> str:
    # raises ValueError for the 31st of February, and for the year 0; strptime took a third of the time of `list`
    datetime.fromisoformat(text.removesuffix("Z"))
    return text


ISO_UTC = "%Y-%m-%dT%H:%M:%SZ"
ISO_UTC_PATTERN = r"\d{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12]\d|3[01])T(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\dZ"
# A time in a run's files. A file with a malformed time counts as damaged.
UtcTime = Annotated[str, Field(pattern=f"^{ISO_UTC_PATTERN}$"), AfterValidator(_of_the_calendar)]
Facts = TypeVar("Facts")
CARD = "README.md"  # of a model; the one output that may change: its owner edits it, and stage eval adds scores


@dataclass(frozen=True)
class Output:
    """One file that a stage left: its path relative to `cluster.root`, size in bytes, and a digest, in hex.

    That of models and of what was fetched is XXH3 (128 bits): SHA-256 would take longer than writing them. Both are
    empty where the file may be made again with other bytes, such as a compiled graph.
    """

    path: str
    size: int
    sha256: str
    xxh3: str = ""

    @property
    def digest(self) -> str:
        return self.sha256 or self.xxh3

    def is_changed(self, root: Path) -> bool:
        """Whether the file has another digest; reads all of it."""
        file = root / self.path
        return (file_sha256(file) if self.sha256 else file_xxh3(file)) != self.digest


def image_state(image: Path) -> dict[str, int] | None:
    """Size in bytes and time of change in ns, for stage env's record; None where the file is not seen."""
    try:
        found = image.stat()
    except OSError:
        return None
    return {"size": found.st_size, "mtime_ns": found.st_mtime_ns}


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
    input_digests: dict[str, str] = field(default_factory=dict)  # `digest` of the records of the stages it needed

    @property
    def digest(self) -> str:
        """A hex digest of what the stage left and of what it was made of, the same when it is made again.

        Without the model's card, which may change.
        """
        left = [(one.path, one.digest) for one in self.outputs if one.digest and Path(one.path).name != CARD]
        return text_sha256(json.dumps([left, self.input_digests], sort_keys=True))

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


def checked(kind: TypeAdapter[Facts], recorded: object, otherwise: Facts) -> Facts:
    """Facts of a record; `otherwise` where they are missing or damaged."""
    try:
        return kind.validate_python(recorded)
    except ValidationError:
        return otherwise


def utc_now() -> str:
    """The time as records give it: ISO 8601, UTC, whole seconds."""
    return time.strftime(ISO_UTC, time.gmtime())


def unix_time(text: str) -> float:
    """Of a time in a run's files: ISO 8601, UTC, whole seconds."""
    return float(calendar.timegm(time.strptime(text, ISO_UTC)))


def outputs_of(
    root: Path,
    paths: Iterable[Path],
    *,
    digests: bool = True,
    sha256: Mapping[Path, str] = MappingProxyType({}),
    xxh3: Mapping[Path, str] = MappingProxyType({}),
) -> tuple[Output, ...]:
    """Outputs for a record: every file at or below `paths`, with its size and, unless `digests` is off, its digest.

    `sha256`, `xxh3`: those that are known, of any of the files. Others are read for their SHA-256.
    """

    def output(file: Path) -> Output:
        path, size = file.relative_to(root).as_posix(), file.stat().st_size
        if not digests:
            return Output(path, size, "")
        if file in xxh3 or file.name == IMAGES:  # training checks each image when it reads it
            return Output(path, size, "", xxh3.get(file) or file_xxh3(file))
        return Output(path, size, sha256.get(file) or file_sha256(file))

    with ThreadPoolExecutor() as pool:
        return tuple(pool.map(output, [file for path in paths for file in files_below(path)]))


def first_changed(root: Path, outputs: Sequence[Output]) -> Output | None:
    """The first of the outputs that has another digest than the recorded one. Raises OSError for a missing file."""
    with ThreadPoolExecutor() as pool:
        changed = pool.map(lambda output: output.is_changed(root), outputs)
        return next((output for output, found in zip(outputs, changed, strict=True) if found), None)
