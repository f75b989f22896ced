"""Reading CloudWatch's streams, with a client that gives two events a page."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from hyperpod_ft.aws import log_streams
from hyperpod_ft.aws.log_streams import LogStream


class _MissingError(Exception):
    pass


class Client:
    """CloudWatch: a token is a position, and at the end the token that was given comes back."""

    exceptions = SimpleNamespace(ResourceNotFoundException=_MissingError)

    def __init__(self, **streams: list[str]) -> None:
        self.streams = streams
        self.described: list[dict[str, Any]] = []

    def get_log_events(self, **request: Any) -> dict[str, Any]:
        assert request["logGroupName"] == "group"
        if request["logStreamName"] not in self.streams:
            raise _MissingError
        lines, limit = self.streams[request["logStreamName"]], request.get("limit", 2)
        begin = int(request.get("nextToken", 0)) if request.get("startFromHead") else max(len(lines) - limit, 0)
        page = lines[begin : begin + limit]
        events = [{"timestamp": begin + number, "message": line} for number, line in enumerate(page)]
        return {"events": events, "nextForwardToken": str(begin + len(page))}

    def get_paginator(self, name: str) -> "Client":
        assert name == "describe_log_streams"
        return self

    def paginate(self, **request: Any) -> Iterator[dict[str, Any]]:
        if request["logGroupName"] != "group":
            raise _MissingError
        for stream in self.described:
            if stream["logStreamName"].startswith(request.get("logStreamNamePrefix", "")):
                yield {"logStreams": [stream]}


def test_every_page_is_read_and_then_only_what_is_new() -> None:
    client = Client(a=["1\n", "2\n", "3\n"])
    stream = LogStream(client, "group", "a")
    assert list(stream.lines(follow=False)) == ["1", "2", "3"]
    assert list(stream.new_events()) == []
    client.streams["a"] += ["4\n", "5\n", "6\n"]
    assert list(stream.lines(follow=False)) == ["4", "5", "6"]
    assert stream.last_lines(2) == ["5", "6"]


def test_following_waits_for_a_stream_and_its_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client()

    def later(_: float) -> None:
        client.described = [{"logStreamName": "a", "creationTime": 1}]
        written = client.streams.setdefault("a", [])
        written.append(f"{len(written)}\n")

    monkeypatch.setattr("hyperpod_ft.progress.time.sleep", later)
    lines = log_streams.wait_for_newest(client, "group").lines(follow=True)
    assert [next(lines) for _ in range(3)] == ["0", "1", "2"]


def test_what_does_not_exist_is_empty() -> None:
    assert list(LogStream(Client(), "group", "a").lines(follow=False)) == []
    assert log_streams.newest_first(Client(), "no such group") == []


def test_the_stream_written_last_is_first() -> None:
    client = Client()
    client.described = [
        {"logStreamName": "x/old", "creationTime": 10},
        {"logStreamName": "x/written", "creationTime": 5, "lastEventTimestamp": 40},
        {"logStreamName": "x/created", "creationTime": 30, "lastEventTimestamp": 20},
        {"logStreamName": "y/other", "creationTime": 99},
    ]
    assert [stream.name for stream in log_streams.newest_first(client, "group", "x/")] == [
        "x/written",
        "x/created",
        "x/old",
    ]
