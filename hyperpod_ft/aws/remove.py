"""From a cluster back to nothing, but for the data unless that is asked for; and what goes on costing money."""

from hyperpod_ft.aws.hyperpod.waiting import ClusterWatch
from hyperpod_ft.aws.session import Session, explained
from hyperpod_ft.aws.stack import stack
from hyperpod_ft.aws.stack.stack import POLL_SECONDS, Remaining


def remove(
    name: str,
    stack_name: str,
    session: Session,
    watch: ClusterWatch,
    *,
    delete_data: bool,
    timeout_seconds: float,
    poll_seconds: float = POLL_SECONDS,
) -> Remaining:
    """Delete the cluster, wait, then what its stack need not keep. Returns what remains. Raises UserError.

    Safe to run again: what is gone already is passed over.
    """
    with explained(f"cluster {name}"):
        watch.until_gone(timeout_seconds)
        return stack.delete(
            session,
            stack_name,
            lambda event: watch.say(f"stack {stack_name}: {event}") if event.worth_telling else None,
            delete_data=delete_data,
            poll_seconds=poll_seconds,
        )
