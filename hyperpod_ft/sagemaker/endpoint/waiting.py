"""Wait for an endpoint: report every change, and the last line of its container's log while it starts."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hyperpod_ft.aws import log_streams
from hyperpod_ft.aws.session import explained
from hyperpod_ft.errors import UserError, printable
from hyperpod_ft.polling import polls
from hyperpod_ft.progress import ChangeReporter, PrintLine, format_minutes
from hyperpod_ft.sagemaker.endpoint.endpoints import CREATING, DELETING, FAILED, IN_SERVICE, Endpoints


def log_group(endpoint: str, component: str | None = None) -> str:
    """What an endpoint's containers print, with a stream for each instance, or of a component for each copy."""
    return f"/aws/sagemaker/InferenceComponents/{component}" if component else f"/aws/sagemaker/Endpoints/{endpoint}"


def tail(client: Any, group: str, count: int) -> list[str]:
    """The last lines of the most recently written stream; none if the container has printed nothing yet."""
    streams = log_streams.newest_first(client, group)
    return streams[0].last_lines(count) if streams else []


def lines(client: Any, group: str, *, follow: bool) -> Iterator[str]:
    """The lines of the most recently written stream, oldest first; with `follow`, waits for more without end."""
    streams = [log_streams.wait_for_newest(client, group)] if follow else log_streams.newest_first(client, group)[:1]
    for stream in streams:
        yield from stream.lines(follow=follow)


def delete(client: Any, group: str) -> None:
    """Delete the log group: CloudWatch bills for it as long as it is stored."""
    with suppress(client.exceptions.ResourceNotFoundException):
        client.delete_log_group(logGroupName=group)


_POLL_SECONDS = 15.0
_LOG_WIDTH = 160


class EndpointFailedError(UserError):
    """SageMaker reports the endpoint or its component as failed; the problem is its reason."""


@dataclass(frozen=True)
class EndpointWatch:
    """Follows one endpoint, and its inference component if it has one."""

    endpoints: Endpoints
    logs: Any  # boto3's client
    name: str
    scales_to_zero: bool
    report: PrintLine

    @cached_property
    def _report_change(self) -> ChangeReporter:
        return ChangeReporter(self.report)

    def until_endpoint(self, timeout_seconds: float) -> None:
        """Wait until the endpoint is in service. Raises EndpointFailedError, or UserError at the timeout."""
        self._until(self._endpoint_state, timeout_seconds, "endpoint")

    def until_component(self, timeout_seconds: float) -> None:
        """Wait for the inference component of an endpoint in service."""
        self._until(self._component_state, timeout_seconds, "inference component")

    def until_gone(self, exists: Callable[[], bool], what: str, timeout_seconds: float) -> None:
        """Wait for a deletion. Raises UserError at the timeout."""
        for waited in polls(_POLL_SECONDS):
            if not exists():
                return
            self._report_change(what, DELETING)
            if waited >= timeout_seconds:
                raise UserError(
                    f"{what} {self.name}: after {format_minutes(timeout_seconds)} still not deleted",
                    "run the command again; it costs money until it is deleted",
                )

    def _until(self, state_of: Callable[[], tuple[str, str]], timeout_seconds: float, what: str) -> None:
        for waited in polls(_POLL_SECONDS):
            status, failure = state_of()
            self._report_change(what, status)
            if status == IN_SERVICE:
                return
            if status in (FAILED, "OutOfService"):
                raise EndpointFailedError(f"{what} {self.name}: {failure or 'SageMaker gave no reason'}")
            if status == DELETING:
                raise UserError(f"{what} {self.name} is being deleted", "run the command again when it is deleted")
            if status == CREATING:
                self._report_log(waited)
            if waited >= timeout_seconds:
                raise UserError(
                    f"{what} {self.name}: after {format_minutes(timeout_seconds)} still {status}",
                    "run the command again to keep waiting",
                )

    def _endpoint_state(self) -> tuple[str, str]:
        found = self.endpoints.find(self.name)
        if found is None:
            raise UserError(f"endpoint {self.name} no longer exists", "deploy it again")
        return found.status, found.failure

    def _component_state(self) -> tuple[str, str]:
        found = self.endpoints.component(self.name)
        if found is None:
            raise UserError(f"inference component of {self.name} no longer exists", "deploy it again")
        return found.status, found.failure

    def log_group(self) -> str:
        component = self.endpoints.name_of_component(self.name) if self.scales_to_zero else None
        return log_group(self.name, component)

    def _report_log(self, waited: float) -> None:
        """What the container printed last; without permission to read it, nothing."""
        try:
            with explained("its log"):
                last = tail(self.logs, self.log_group(), 1)
        except UserError:
            return
        for line in last:
            self._report_change("container", printable(line.strip())[:_LOG_WIDTH], f"after {waited / 60:.0f} min: ")
