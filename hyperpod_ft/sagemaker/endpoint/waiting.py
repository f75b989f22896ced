"""Wait for an endpoint: report every change, and the last line of its container's log while it starts."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hyperpod_ft.aws import log_streams
from hyperpod_ft.aws.session import Session, explained
from hyperpod_ft.errors import UserError, printable
from hyperpod_ft.progress import ChangeReporter, PrintLine, format_minutes, polls
from hyperpod_ft.sagemaker.endpoint.endpoint_request import component_name
from hyperpod_ft.sagemaker.endpoint.endpoints import (
    CREATING,
    DELETING,
    ENDPOINT,
    FAILED,
    IN_SERVICE,
    Component,
    Endpoint,
    Endpoints,
    Kind,
)


def log_group(endpoint: str, component: str | None = None) -> str:
    """What an endpoint's containers print, with a stream for each instance, or of a component for each copy."""
    return f"/aws/sagemaker/InferenceComponents/{component}" if component else f"/aws/sagemaker/Endpoints/{endpoint}"


def lines(client: Any, group: str, *, follow: bool) -> Iterator[str]:
    """The lines of the most recently written stream, oldest first; with `follow`, waits for more without end."""
    streams = [log_streams.wait_for_newest(client, group)] if follow else log_streams.newest_first(client, group)[:1]
    for stream in streams:
        yield from stream.lines(follow=follow)


_POLL_SECONDS = 15.0
_LOG_WIDTH = 160
_DELETION_SECONDS = 1800.0


Find = Callable[[str], Endpoint | Component | None]  # by the endpoint's name


class EndpointFailedError(UserError):
    """SageMaker reports the endpoint or its component as failed; the problem is its reason."""


@dataclass(frozen=True)
class EndpointWatch:
    """Follows one endpoint, and its inference component if it has one."""

    session: Session
    name: str
    report: PrintLine

    @property
    def endpoints(self) -> Endpoints:
        return Endpoints(self.session.client("sagemaker"), self.report)

    @cached_property
    def _report_change(self) -> ChangeReporter:
        return ChangeReporter(self.report)

    def _called(self, kind: Kind) -> str:
        return f"{kind.words} {self.name if kind is ENDPOINT else component_name(self.name)}"

    def until_gone(self, kind: Kind, find: Find) -> None:
        """Delete the endpoint or its component as soon as SageMaker accepts that, and wait. Raises UserError after half
        an hour."""
        for waited in polls(_POLL_SECONDS):
            found = find(self.name)
            if found is None:
                return
            if found.status != DELETING:
                self.endpoints.delete(kind, found.name)
            self._report_change(kind.words, DELETING)
            if waited >= _DELETION_SECONDS:
                raise UserError(
                    f"{self._called(kind)}: after {format_minutes(_DELETION_SECONDS)} still not deleted",
                    "run the command again; it costs money until it is deleted",
                )

    def until_in_service(self, kind: Kind, find: Find, timeout_seconds: float) -> None:
        """Wait until the endpoint or its component is in service.

        Raises EndpointFailedError, and UserError when it no longer exists or at the timeout.
        """
        for waited in polls(_POLL_SECONDS):
            found = find(self.name)
            if found is None:
                raise UserError(f"{self._called(kind)} no longer exists", "deploy it again")
            status = found.status
            self._report_change(kind.words, status)
            if status == IN_SERVICE:
                return
            if status in (FAILED, "OutOfService"):
                raise EndpointFailedError(f"{self._called(kind)}: {found.failure or 'SageMaker gave no reason'}")
            if status == DELETING:
                raise UserError(f"{self._called(kind)} is being deleted", "run the command again when it is deleted")
            if status == CREATING:
                self._report_log(waited)
            if waited >= timeout_seconds:
                raise UserError(
                    f"{self._called(kind)}: after {format_minutes(timeout_seconds)} still {status}",
                    "run the command again to keep waiting",
                )

    def log_group(self) -> str:
        return log_group(self.name, self.endpoints.name_of_component(self.name))

    def _report_log(self, waited: float) -> None:
        """What the container printed last; without permission to read it, nothing."""
        try:
            with explained("its log"):
                streams = log_streams.newest_first(self.session.client("logs"), self.log_group())
                last = streams[0].last_lines(1) if streams else []
        except UserError:
            return
        for line in last:
            self._report_change("container", printable(line.strip())[:_LOG_WIDTH], f"after {waited / 60:.0f} min: ")
