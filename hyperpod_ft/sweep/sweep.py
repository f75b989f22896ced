"""A sweep on the volume: its points, the run of each, and where that is written."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from hyperpod_ft import publish
from hyperpod_ft.errors import UserError
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.run_paths import directory_of
from hyperpod_ft.sweep.sweep_file import Settings


@dataclass(frozen=True)
class Point:
    """One run of a sweep."""

    settings: Settings
    run: str  # name/id
    origin: str  # the run file with the settings, as arguments of `submit`
    # Of the runs of one lane one trains at a time. None: not submitted, or the sweep has no limit.
    lane: int | None = None


@dataclass(frozen=True)
class Sweep:
    """A sweep as it was submitted: <root>/sweeps/<name>/sweep.json."""

    root: Path
    name: str
    runs_at_a_time: int | None
    launcher: str
    points: tuple[Point, ...]

    @classmethod
    def open(cls, directory: Path) -> "Sweep":
        """The sweep in a directory. Raises UserError when there is none, or it is damaged."""
        path = directory / "sweep.json"
        try:
            sweep = _SWEEP.validate_json(path.read_bytes())
        except OSError as error:
            raise UserError(
                f"{directory}: no sweep.json in it", "give a sweep file or the directory of a sweep"
            ) from error
        except ValueError as error:
            raise UserError(f"{path}: is damaged", "remove it, and submit the sweep file again") from error
        # as it is called here: the volume may have another path than on the machine that wrote it
        return replace(sweep, root=directory.resolve().parents[1])

    @property
    def directory(self) -> Path:
        return self.root / "sweeps" / self.name

    @property
    def path(self) -> Path:
        return self.directory / "sweep.json"

    @property
    def lock_path(self) -> Path:
        """Locked while the sweep is submitted or cancelled."""
        return self.directory / "submit.lock"

    def write(self) -> None:
        publish.write_json(self.path, asdict(self) | {"root": str(self.root)})

    def run_directory(self, point: Point) -> Path:
        return directory_of(self.root, point.run)

    def open_run(self, point: Point) -> Run:
        """Raises UserError when the run's directory was removed or is damaged."""
        return Run.open(self.run_directory(point))

    def open_if_intact(self, point: Point) -> Run | None:
        """The run; None when its directory was removed or is damaged."""
        try:
            return self.open_run(point)
        except UserError:
            return None

    @property
    def keys(self) -> list[str]:
        """The keys that points set, in the order of the file."""
        return list(dict.fromkeys(key for point in self.points for key in point.settings))


_SWEEP = TypeAdapter(Sweep)
