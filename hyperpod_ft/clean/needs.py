"""What a run needs on the volume besides its own directory."""

import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from hyperpod_ft.runs.journal import Journal
from hyperpod_ft.runs.run import Run

_CODE = re.compile(r"^code=(.+)$", re.MULTILINE)  # in the scripts of templates/sbatch/


def needs(run: Run) -> frozenset[str]:
    """The names, relative to `root`, of all that the run's stages read, or would make again if it were missing."""
    return frozenset(run.paths.relative(path) for path in _paths(run) if path.is_relative_to(run.paths.root))


def _paths(run: Run) -> Iterator[Path]:
    config = run.config
    yield from (*run.paths.fetched, *run.paths.inputs)
    yield run.paths.dataset_path
    yield run.paths.environment_path
    if run.paths.image:
        yield run.paths.image
    if "precompile" in run.plan:
        yield run.paths.neuron_cache
    if config.engine == "torch" and config.training.compiles(config.instance.has_accelerators):
        yield run.paths.compile_cache
    for tracker in config.tracking.trackers:
        yield run.paths.tracker_environment(tracker)
    pythons = [config.env.python, config.tracking.python]
    if config.eval:
        pythons.append(config.eval.python)
        yield from (run.paths.evaluation_environment, run.paths.evaluation_hub, run.paths.base_scores)
        if run.paths.own_tasks:
            yield run.paths.own_tasks
    # another run's model, or an interpreter that was made elsewhere on this volume
    others = [config.model.adapter.source] if config.model.adapter else []
    others += [config.teacher.source] if config.teacher else []
    for given in (config.model.source, *others, *(part.dataset.source for part in config.dataset.parts), *pythons):
        if given and given.startswith("/"):
            yield Path(given)
            # an interpreter is written as the user calls it, the root without links
            yield Path(given).parent.resolve() / Path(given).name
    yield from _code(run.journal)


def _code(journal: Journal) -> Iterator[Path]:
    """The copies of the kit's code that the run's scripts import."""
    for script in (journal.paths.directory / "sbatch").glob("*.sbatch"):
        try:
            code = _CODE.search(script.read_text(encoding="utf-8"))
        except OSError:
            continue
        if code:
            yield Path(shlex.split(code[1])[0])
    # a later submission overwrites the scripts here; sbatch has copied those that jobs of an earlier one run
    yield from (Path(submission.code) for submission in journal.submissions())


class NeedIndex:
    """Which runs need a path on the volume."""

    def __init__(self, needed: Iterable[tuple[str, frozenset[str]]]) -> None:
        """`needed`: each run's full name, with what `needs` says."""
        self._exactly: dict[str, set[str]] = {}
        self._below: dict[str, set[str]] = {}  # something at or below this path
        for run, names in needed:
            for name in names:
                self._exactly.setdefault(name, set()).add(run)
                for path in (name, *_above(name)):
                    self._below.setdefault(path, set()).add(run)

    def runs_that_need(self, name: str) -> list[str]:
        """The runs that need the path, something below it, or a directory that it is in."""
        found = set(self._below.get(name, ()))
        for directory in _above(name):
            found |= self._exactly.get(directory, set())
        return sorted(found)


def _above(name: str) -> list[str]:
    return [path.as_posix() for path in PurePosixPath(name).parents][:-1]
