"""CloudWatch's streams of a training job as the log files of its stages. The client of CloudWatch is a stand-in that
answers in pages, as CloudWatch does."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from hyperpod_ft.runs.run import Run
from hyperpod_ft.sagemaker import launcher
from hyperpod_ft.sagemaker.launcher import LOG_GROUP, JobLogs

NAME = "test-0123-train-1"


class Logs:
    """Lines by stream, with their times; two in a page."""

    class exceptions:  # noqa: N801 - boto3's name
        class ResourceNotFoundException(Exception):  # noqa: N818 - boto3's name
            pass

    def __init__(self) -> None:
        self.streams: dict[str, list[tuple[int, str]]] | None = None

    def client(self, service: str) -> "Logs":
        assert service == "logs"
        return self

    def get_paginator(self, _: str) -> "Logs":
        return self

    def paginate(self, **given: str) -> Iterator[dict[str, Any]]:
        assert given["logGroupName"] == LOG_GROUP
        if self.streams is None:
            raise self.exceptions.ResourceNotFoundException
        names = [name for name in self.streams if name.startswith(given["logStreamNamePrefix"])]
        yield {"logStreams": [{"logStreamName": name, "creationTime": 1} for name in names]}

    def get_log_events(self, **given: Any) -> dict[str, Any]:
        assert self.streams is not None
        lines, first = self.streams[given["logStreamName"]], int(given.get("nextToken", "0"))
        events = [{"timestamp": at, "message": text} for at, text in lines[first : first + 2]]
        return {"events": events, "nextForwardToken": str(first + len(events))}


@pytest.fixture
def logs(monkeypatch: pytest.MonkeyPatch) -> Logs:
    monkeypatch.setattr(launcher, "explained", lambda _: nullcontext())
    return Logs()


@pytest.fixture
def run(make_run: Callable[..., Run]) -> Run:
    return make_run()


def of(run: Run, logs: Logs, *stages: str) -> JobLogs:
    return JobLogs(run, NAME, stages, logs)  # type: ignore[arg-type]


def read(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_lines_go_to_the_stage_that_has_begun(run: Run, logs: Logs) -> None:
    logs.streams = {
        f"{NAME}/algo-1-1700000000": [
            (1, "interpreter: ready"),
            (2, f"== precompile job {NAME} on algo-1"),
            (3, "compiling"),
            (6, f"== train job {NAME} on algo-1"),
            (8, "step 1/8\n"),
        ],
        f"{NAME}/algo-2-1700000000": [(4, "compiling"), (9, "step 1/8")],
        "test-0123-train-11/algo-1-1700000000": [(1, "of another job")],
    }
    of(run, logs, "precompile", "train").update()
    assert read(run.paths.fetched_log("precompile", NAME)) == [
        "interpreter: ready",
        f"== precompile job {NAME} on algo-1",
        "compiling",
        "algo-2: compiling",
    ]
    assert read(run.paths.fetched_log("train", NAME)) == [
        f"== train job {NAME} on algo-1",
        "step 1/8",
        "algo-2: step 1/8",
    ]


def test_only_what_is_new_is_added(run: Run, logs: Logs) -> None:
    followed = of(run, logs, "train")
    followed.update()
    assert not run.paths.fetched_log("train", NAME).exists(), "there is no log group before the first job"
    stream = f"{NAME}/algo-1-1700000000"
    logs.streams = {stream: [(at, f"step {at}/8") for at in range(1, 4)]}
    followed.update()
    path = run.paths.fetched_log("train", NAME)
    with path.open() as reading:
        assert len(reading.readlines()) == 3
        logs.streams[stream].append((4, "step 4/8"))
        # after a spot interruption the containers have streams of their own
        logs.streams[f"{NAME}/algo-1-1700000999"] = [(5, "train: resuming from step 3")]
        followed.update()
        assert reading.readlines() == ["step 4/8\n", "train: resuming from step 3\n"]
    of(run, logs, "train").update()
    assert len(read(path)) == 5, "another program begins anew"
