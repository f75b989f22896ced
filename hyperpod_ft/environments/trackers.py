"""The environments of trackers' packages, one for each tracker, shared by all runs below a root.

    python -m hyperpod_ft.environments.trackers RUN_DIR      beside stage env

They are no outputs of a stage: no result depends on them, and a tracker that cannot be installed does not fail a run.
"""

import os
import sys
from pathlib import Path

from hyperpod_ft import publish
from hyperpod_ft.environments.installation import build
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.pins import pins_file
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.selection import trackers_to_install


def install_trackers(run: Run) -> dict[str, str]:
    """Create the environments that are missing. Returns why one could not be made, by tracker."""
    problems = {}
    for tracker in trackers_to_install(run):
        environment = run.paths.tracker_environment(tracker)
        try:
            with publish.lock(environment.with_name(f".{environment.name}.lock")):
                if not environment.exists():
                    build(pins_file(run.paths.tracker_pins(tracker)), environment)
        except (UserError, OSError) as error:
            problems[tracker] = str(error)
    return problems


def main() -> None:
    """Run the command line; problems are printed, and are no failure."""
    os.nice(10)
    try:
        problems = install_trackers(Run.open(Path(sys.argv[1])))
    except UserError:
        return  # stage env reports it
    for tracker, problem in problems.items():
        print(f"env: warning: tracking: {tracker}: {problem}; the run continues without it", flush=True)


if __name__ == "__main__":
    main()
