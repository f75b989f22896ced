"""Where the client and the containers of training jobs both see a run: one file system, or a store in S3."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from hyperpod_ft.aws.session import Session
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.sagemaker.groups import section_of
from hyperpod_ft.runs.run import Run


class Place(Protocol):
    """What the launcher asks of it."""

    def prepare(self) -> None:
        """Make everything visible that the containers need of a run that is about to start."""

    def refresh(self) -> None:
        """Bring the small files of the run here: records, jobs, metrics; and which outputs exist."""

    def publish(self, files: Iterable[Path]) -> None:
        """Make these files, which this program has just written, visible to the others."""

    def discard(self, stages: Sequence[str]) -> None:
        """Forget that these stages were done."""


class OnFileSystem:
    """The file system that SageMaker mounts is mounted here too: every file is already where the others see it."""

    def prepare(self) -> None: ...

    def refresh(self) -> None: ...

    def publish(self, files: Iterable[Path]) -> None: ...

    def discard(self, stages: Sequence[str]) -> None: ...


def place_of(run: Run, session: Session) -> Place:
    """Raises UserError for a store."""
    if section_of(run).store is not None:
        raise UserError("sagemaker.store: runs in S3 are not submitted yet", "set sagemaker.file_system")
    return OnFileSystem()
