"""The steps of a day, one after another, until one fails; and the report of what happened."""

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from hyperpod_ft import publish
from hyperpod_ft.aws.session import Session, observed
from hyperpod_ft.doctor.head_node import heading, shareable
from hyperpod_ft.errors import UserError
from hyperpod_ft.first_day.plan import PRICES_OF, REGION, DayStep, at_most
from hyperpod_ft.first_day.recorder import Recorder
from hyperpod_ft.first_day.steps import DayAccount, TimeIsUp, inspect_cluster, serve, store, train
from hyperpod_ft.progress import PrintLine, format_duration

LOGS = "Logs remain in CloudWatch, below /aws/sagemaker/; they cost cents."


@dataclass
class Day:
    """What happened. `rows`: of each step a line; `failed`: of a step, or of a deletion."""

    rows: list[str] = field(default_factory=list)
    remains: list[str] = field(default_factory=list)
    failed: bool = False

    def summary(self) -> list[str]:
        """For the user, and for the report."""
        return [*self.rows, *(f"REMAINS: {each}" for each in self.remains or ["nothing"]), LOGS]


def run(steps: Sequence[DayStep], directory: Path, report: Path, say: PrintLine) -> Day:
    """Do the steps; print what happened and write the report, also when that is interrupted.

    `directory`: new, for runs and their logs; what is created has its name. Raises UserError before anything is created
    where resources of another day exist or the report cannot be written, and KeyboardInterrupt after what was created
    is deleted. Only in the main thread.
    """
    day, recorder = Day(), Recorder()

    def tell(line: str) -> None:
        with suppress(OSError):  # of a terminal that was closed: what was created is deleted all the same
            say(line)

    account = DayAccount(directory, Session(REGION), tell, remains=day.remains)
    with observed(recorder.observe), _ended_by_signals():
        account.refuse_leftovers()
        try:
            publish.write_text(report, "")
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{report}: {error.strerror}; nothing was created", "name another --report") from error
        try:
            _perform(steps, account, day)
        finally:
            day.failed = day.failed or bool(day.remains)
            with suppress(OSError):
                print(*day.summary(), sep="\n", flush=True)
            done = [*day.summary(), "", "Requests to AWS, with its answers, by the first of each kind, in UTC:"]
            text = [*heading("first-day"), f"at most: {PRICES_OF}", "", *done, *recorder.lines()]
            publish.write_text(report, shareable("\n".join(text) + "\n"))
            tell(f"for an issue, what AWS answered: {report}")
    return day


def _perform(steps: Sequence[DayStep], account: DayAccount, day: Day) -> None:
    with ExitStack() as until_the_end:
        made = None
        for step in steps:
            began, seen = time.monotonic(), ""
            account.say(f"step {step.name}: {step.shows}")
            try:
                if step.kind == "training":
                    made = made or until_the_end.enter_context(store(account))
                    seen = train(account, step, made)
                else:
                    seen = (serve if step.kind == "endpoint" else inspect_cluster)(account, step)
            except (UserError, TimeIsUp, KeyboardInterrupt) as problem:
                seen, day.failed = f"FAILED: {str(problem) or 'interrupted'}", True
                if isinstance(problem, KeyboardInterrupt):
                    raise
                return
            except BaseException as bug:
                seen, day.failed = f"FAILED: hyperpod-ft has a bug: {bug!r}", True
                raise
            finally:
                took = format_duration(time.monotonic() - began)
                day.rows.append(f"{step.name}: {seen} ({took}, at most ${at_most(step):.2f})")
                account.say(day.rows[-1])
            if account.remains:  # it keeps costing money, to which the user has not agreed
                return


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end a day as Ctrl-C does: what was created is deleted."""

    def interrupt(_: int, __: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
