"""How far a tracker got with a run: a small file for each tracker, in the run's directory."""

import secrets
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from hyperpod_ft import publish
from hyperpod_ft.errors import UserError
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.run_paths import RunPaths


@dataclass(frozen=True)
class TrackerState:
    """What a tracker has of a training run.

    `key` names the training there, the same for every follower. It is new when the training was forced to start again,
    because that moves the files of its earlier attempts away.
    """

    key: str
    step: int = 0  # the newest that was published
    final: dict[str, float] = field(default_factory=dict)  # the final figures that were published
    where: str = ""  # the run in the tracker, for people: a URL or a directory
    problem: str = ""  # why the tracker was not reached last time

    @classmethod
    def read(cls, run: Run, tracker: str) -> "TrackerState":
        """The state in the run's directory; without a file a new one, which nothing was published under.

        Raises OSError and UserError when the file cannot be read: a new key would publish the training twice.
        """
        path = _path(run.paths, tracker)
        try:
            return _STATE.validate_json(path.read_bytes())
        except FileNotFoundError:
            return cls(f"{run.plan.run_id}-{secrets.token_hex(3)}")
        except ValueError as error:
            raise UserError(f"{path}: is damaged", "remove it to publish the training again, as another run") from error

    def write(self, run: Run, tracker: str) -> None:
        publish.write_json(_path(run.paths, tracker), asdict(self))


_STATE = TypeAdapter(TrackerState)


def _path(paths: RunPaths, tracker: str) -> Path:
    return paths.tracking / f"{tracker}.json"
