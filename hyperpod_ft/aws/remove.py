"""From a cluster back to nothing, but for the data unless that is asked for; and what goes on costing money."""

from collections.abc import Callable

from hyperpod_ft.amount import amount
from hyperpod_ft.aws import stack
from hyperpod_ft.aws.session import Session, explained
from hyperpod_ft.aws.stack import POLL_SECONDS, Remains
from hyperpod_ft.aws.waiting import Watch

Say = Callable[[str], None]


def remove(
    name: str,
    stack_name: str,
    session: Session,
    watch: Watch,
    *,
    delete_data: bool,
    timeout_seconds: float,
    poll_seconds: float = POLL_SECONDS,
) -> Remains:
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


def costs(remains: Remains) -> list[str]:
    """What is still there and costs money, a line each."""
    lines = []
    if remains.filesystem:
        lines.append(f"file system {remains.filesystem.id}: {remains.filesystem.gib} GiB, billed by the hour")
    if remains.bucket:
        lines.append(
            f"bucket {remains.bucket.name}: {amount(remains.bucket.bytes)} in {remains.bucket.objects} objects"
        )
    if remains.nat_gateway_id:
        lines.append(f"NAT gateway {remains.nat_gateway_id}, billed by the hour")
    if remains.elastic_ip:
        lines.append(f"address {remains.elastic_ip}, billed by the hour")
    return lines
