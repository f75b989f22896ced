"""A view of a run on the terminal, from the first look until the run ends or the user leaves."""

from dataclasses import replace
from functools import partial

from hyperpod_ft.cli.watch import screen, terminal
from hyperpod_ft.cli.watch.keys import View, press
from hyperpod_ft.cli.watch.watcher import Picture, Watcher
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.launch.status import RunStatus
from hyperpod_ft.runs.records import utc_now
from hyperpod_ft.runs.run import Run

_CLOCK_SECONDS = 1.0  # between two pictures of a run in which nothing happens


def watch(run: Run, launchers: Launchers) -> tuple[RunStatus | None, bool]:
    """The last status, None before the first one; and whether the run ended, otherwise the user left.

    Prints what happened meanwhile, after the terminal is as it was. Raises what ended the following early: UserError,
    or KeyboardInterrupt and SystemExit of a signal.
    """
    watcher = None
    try:
        with terminal.opened() as opened:
            watcher = Watcher(run, launchers, opened.wake)
            watcher.start()
            _until_it_ends(watcher, opened)
    finally:
        if watcher:
            watcher.stop()
            for message in watcher.messages:
                print(message)
    if watcher.error:
        raise watcher.error
    return watcher.picture.status if watcher.picture else None, watcher.ended


def _until_it_ends(watcher: Watcher, opened: terminal.Terminal) -> None:
    """Draw and obey keys until the run or the following ends, or the user leaves."""
    view, seen = View(), Picture.unknown(watcher.run)
    while not (watcher.ended or watcher.error):
        new = watcher.picture or seen
        # a log that was scrolled stands still
        seen = replace(new, log=seen.log) if view.lines_back and new.stage == seen.stage else new
        seen = replace(seen, cancelling=watcher.cancelling)
        opened.draw(partial(screen.draw, seen, view, utc_now()))
        for key in opened.keys(_CLOCK_SECONDS):
            stages = [stage.stage for stage in seen.status.stages]
            page = opened.height - screen.FRAME_LINES
            view, action = press(view, key, stages, view.stage or seen.stage, page, len(seen.log))
            if action == "leave":
                return
            if action == "cancel":
                watcher.cancel()
            watcher.show_log(view.stage)
