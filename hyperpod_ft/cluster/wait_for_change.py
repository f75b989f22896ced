"""Follow a change that HyperPod makes after a request, report what is seen of it, and wait for its end."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from hyperpod_ft.errors import UserError
from hyperpod_ft.polling import polls
from hyperpod_ft.progress import ChangeReporter, PrintLine, format_minutes

POLL_SECONDS = 15.0
_POLLS_UNTIL_BEGUN = 8  # after these, HyperPod has nothing to change

Observed = TypeVar("Observed")


@dataclass(frozen=True)
class Seen(Generic[Observed]):
    """One look at what changes. `states`: what to report of it, by name."""

    state: Observed
    states: Mapping[str, str]
    begun: bool  # whether it shows the request; at first HyperPod may still answer what was before
    changing: bool


def wait_for_change(
    look: Callable[[], Seen[Observed]], report: PrintLine, *, timeout_seconds: float, command: str
) -> tuple[Observed, bool]:
    """The state once HyperPod has stopped changing it, and whether it ever showed the request.

    `command`: shows the state later. Raises UserError at the timeout.
    """
    begun, report_change = False, ChangeReporter(report)
    for count, waited in enumerate(polls(POLL_SECONDS), 1):
        seen = look()
        begun = begun or seen.begun
        for name, state in seen.states.items() if begun else ():
            report_change(name, state)
        if not seen.changing and (begun or count >= _POLLS_UNTIL_BEGUN):
            break
        if waited >= timeout_seconds:
            still = "; ".join(f"{name}: still {state}" for name, state in seen.states.items())
            raise UserError(
                f"{still}, after {format_minutes(timeout_seconds)}", f"HyperPod continues; check with `{command}`"
            )
    return seen.state, begun
