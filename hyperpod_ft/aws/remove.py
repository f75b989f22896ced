"""Delete a cluster and what its stack need not keep; report what still costs money."""

from hyperpod_ft.aws.hyperpod import api
from hyperpod_ft.aws.hyperpod.waiting import ClusterWatch
from hyperpod_ft.aws.session import Session, explained
from hyperpod_ft.aws.stack import stack
from hyperpod_ft.aws.stack.stack import POLL_SECONDS, Remaining
from hyperpod_ft.errors import UserError


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
    """Delete the cluster, wait, then delete its stack or reduce it to the data. Returns what remains. Raises UserError.

    Safe to run again.
    """
    with explained(f"cluster {name}"):
        while True:
            watch.until_gone(timeout_seconds)
            try:
                remaining = stack.delete(
                    session,
                    stack_name,
                    lambda event: watch.report(f"stack {stack_name}: {event}") if event.worth_reporting else None,
                    delete_data=delete_data,
                    poll_seconds=poll_seconds,
                )
            except UserError as error:
                if api.find(watch.sagemaker, name) is None:
                    raise
                watch.report(f"{error.problem}: a cluster {name} has been created meanwhile")
                continue
            if api.find(watch.sagemaker, name) is None:
                return remaining
