"""What is written down about a run: the record of each stage, and every job submitted."""

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hyperpod_ft import publish

ISO_UTC = "%Y-%m-%dT%H:%M:%SZ"


@dataclass(frozen=True)
class Output:
    """One file a stage left: its path relative to `cluster.root`, size in bytes, and SHA-256.

    The digest is empty where nobody asks for it: reading a model again to make it takes longer than making the model.
    """

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Record:
    """What a stage leaves when it has finished: the only proof that it did."""

    stage: str
    fingerprint: str
    inputs: dict[str, str]  # fingerprints of the stages it needed
    outputs: tuple[Output, ...]
    facts: dict[str, Any]  # what the stage wants known: rows, tokens, losses
    started: str  # ISO 8601, UTC
    seconds: float
    host: str
    job_id: str
    versions: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "Record | None":
        """The record at `path`; None when there is none, or it cannot be one of ours."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            outputs = tuple(Output(**output) for output in values.pop("outputs"))
            record = cls(outputs=outputs, **values)
            return record if isinstance(record.facts, dict) else None
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None

    def write(self, path: Path) -> None:
        publish.write_json(path, asdict(self))


@dataclass(frozen=True)
class Job:
    """One submission of one stage."""

    stage: str
    job_id: str
    launcher: str
    submitted: str  # ISO 8601, UTC
    slurm_conf: str = ""  # of the cluster it was submitted to, when one was named

    @property
    def cluster_is_gone(self) -> bool:
        """A local cluster's slurm.conf exists while the cluster does."""
        return bool(self.slurm_conf) and not Path(self.slurm_conf).exists()


def utc_now() -> str:
    """The time as records give it: ISO 8601, UTC, whole seconds."""
    return time.strftime(ISO_UTC, time.gmtime())
