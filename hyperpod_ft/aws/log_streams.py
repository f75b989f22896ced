"""Reads streams of CloudWatch Logs. `client` is boto3's for logs throughout. What does not exist yet is empty."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from hyperpod_ft.progress import pause, polls

_POLL_SECONDS = 5.0


@dataclass
class LogStream:
    """One stream of a log group, and how far it has been read."""

    client: Any
    group: str
    name: str
    _token: str = field(default="", init=False)

    def new_events(self) -> Iterator[dict[str, Any]]:
        """The events (`timestamp` in ms, `message`) since the last call, oldest first; at first from the beginning."""
        while True:
            token = {"nextToken": self._token} if self._token else {}
            try:
                page = self.client.get_log_events(
                    logGroupName=self.group, logStreamName=self.name, startFromHead=True, **token
                )
            except self.client.exceptions.ResourceNotFoundException:
                return
            yield from page["events"]
            # at the end CloudWatch returns the token that it was given
            if page["nextForwardToken"] == self._token:
                return
            self._token = page["nextForwardToken"]

    def lines(self, *, follow: bool) -> Iterator[str]:
        """The lines, oldest first; with `follow`, waits for more without end."""
        for _ in polls(_POLL_SECONDS):
            yield from (line_of(event) for event in self.new_events())
            if not follow:
                return

    def last_lines(self, count: int) -> list[str]:
        """The last lines, in one request."""
        # without startFromHead the first page is the newest
        page = self.client.get_log_events(logGroupName=self.group, logStreamName=self.name, limit=count)
        return [line_of(event) for event in page["events"]]


def newest_first(client: Any, group: str, prefix: str = "") -> list[LogStream]:
    """The streams of a group whose names begin with `prefix`, the most recently written first."""
    named = {"logStreamNamePrefix": prefix} if prefix else {}
    pages = client.get_paginator("describe_log_streams").paginate(logGroupName=group, **named)
    streams: list[dict[str, Any]] = []
    with suppress(client.exceptions.ResourceNotFoundException):
        streams = [stream for page in pages for stream in page["logStreams"]]
    # CloudWatch may report a stream's last event only after an hour, but its creation at once
    streams.sort(key=lambda stream: max(stream.get("lastEventTimestamp", 0), stream["creationTime"]), reverse=True)
    return [LogStream(client, group, stream["logStreamName"]) for stream in streams]


def wait_for_newest(client: Any, group: str) -> LogStream:
    """The stream that was written last, once there is one."""
    while not (streams := newest_first(client, group)):
        pause(_POLL_SECONDS)
    return streams[0]


def line_of(event: dict[str, Any]) -> str:
    return str(event["message"]).rstrip("\n")
