"""The commands that show a run elsewhere."""

from typing import Annotated

import typer

from hyperpod_ft.errors import UserError

app = typer.Typer()

_TRACK_SECONDS = 600.0


@app.command()
def track(
    run: Annotated[
        str | None,
        typer.Argument(metavar="[RUN]", help="A run directory, run file or recipe. Default: the run submitted last."),
    ] = None,
) -> None:
    """Publish to the run's trackers what they do not have yet: metrics and final figures.

    For trackers that could not be reached, and for training jobs. Exit code 1 when one still lacks something.
    """
    from hyperpod_ft.launch.launchers import Launchers
    from hyperpod_ft.runs import references
    from hyperpod_ft.stages.env import install_trackers
    from hyperpod_ft.tracking.follower import Ending, follow

    found = references.find(run)
    if not found.config.tracking.trackers:
        raise UserError("tracking.trackers: this run has none", "name some in its run file, and give that file as RUN")
    Launchers.of(found).refresh(found)
    for problem in install_trackers(found).values():
        print(problem)
    ending = Ending()
    ending.begin(_TRACK_SECONDS)
    states = follow(found, ending)
    for tracker, state in states.items():
        print(f"{tracker}: published to step {state.step} {state.problem or state.where}")
    raise typer.Exit(1 if any(state.problem for state in states.values()) else 0)
