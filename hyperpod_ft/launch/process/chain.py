"""The states of one submission of launcher `process`: a file, and a lock that its chain runner and its script hold."""

import fcntl
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from hyperpod_ft import publish
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.interface import Dependency, JobState


@dataclass
class ChainJob:
    """A script of a chain, its state in Slurm's terms, and its process once it has started."""

    stage: str
    job_id: str
    dependencies: list[Dependency]
    state: str = "PENDING"
    pid: int | None = None


@dataclass
class Chain:
    """The scripts of one submission, in the order they run, and the process that runs them."""

    jobs: list[ChainJob]
    pid: int | None = None

    @classmethod
    def read(cls, path: Path) -> "Chain":
        """Raises UserError when the file is damaged."""
        try:
            return _CHAIN.validate_json(path.read_bytes())
        except ValueError as error:
            raise UserError(f"{path}: is damaged", "remove it once its processes have ended") from error

    def write(self, path: Path) -> None:
        publish.write_json(path, asdict(self))


_CHAIN = TypeAdapter(Chain)


def chains(directory: Path) -> Iterator[tuple[Path, Chain]]:
    """The chain of each submission of the run in `directory`, with the file that holds its states."""
    for state_file in _state_files(directory):
        yield state_file, Chain.read(state_file)


def job_states(directory: Path) -> dict[str, JobState]:
    """The states of the jobs of the run in `directory`, without those that a killed chain runner did not finish."""
    found: dict[str, JobState] = {}
    for state_file in _state_files(directory):
        alive = is_alive(state_file)  # asked first: a chain runner that ends meanwhile has written the last states
        for job in Chain.read(state_file).jobs:
            state = JobState(job.state, nodes="this machine")
            if alive or not state.active:
                found[job.job_id] = state
    return found


def is_alive(state_file: Path) -> bool:
    """Whether the chain runner of this submission, or the script it has left, still runs."""
    with suppress(FileNotFoundError), state_file.with_suffix(".lock").open() as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _state_files(directory: Path) -> list[Path]:
    return sorted((directory / "processes").glob("*.json"))
