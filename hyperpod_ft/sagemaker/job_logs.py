"""The output of a training job's containers, from CloudWatch to a file for each stage, as it grows.

Each container has a stream `<job>/algo-<n>-<time>` in the log group below, and a further one after each restart. The
first host's lines say which stage has begun; lines of other hosts are marked with the host.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from hyperpod_ft.aws import log_streams
from hyperpod_ft.aws.log_streams import LogStream, line_of
from hyperpod_ft.aws.session import Session, explained
from hyperpod_ft.runs.job_files import BANNER
from hyperpod_ft.runs.run import Run

LOG_GROUP = "/aws/sagemaker/TrainingJobs"
_FIRST_HOST = "algo-1"
_STREAM = re.compile(r".*/(algo-\d+)-[^/]*")


class JobLogs:
    """The logs of one training job. `update` adds what is new since the last call; the first call reads all."""

    def __init__(self, run: Run, name: str, stages: Sequence[str], session: Session) -> None:
        self._run, self._name, self._stages = run, name, tuple(stages)
        self._session = session
        self._streams: dict[str, LogStream] = {}  # by name
        self._stage = self._stages[0]
        self._begun: set[str] = set()

    def update(self) -> None:
        """Raises UserError when CloudWatch cannot be read. A job without streams has no logs yet."""
        with explained(f"log of training job {self._name}"):
            events = list(self._new_events(self._session.client("logs")))
        # stable: lines of one stream keep their order
        events.sort(key=lambda event: event[0])
        lines: dict[str, list[str]] = {}
        for _, host, message in events:
            begins = BANNER.match(message)
            if host == _FIRST_HOST and begins and begins[1] in self._stages:
                self._stage = begins[1]
            mark = "" if host == _FIRST_HOST else f"{host}: "
            lines.setdefault(self._stage, []).append(f"{mark}{message}\n")
        for stage, added in lines.items():
            path = self._run.paths.fetched_log(stage, self._name)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a" if stage in self._begun else "w", encoding="utf-8") as file:
                file.writelines(added)
            self._begun.add(stage)

    def _new_events(self, client: Any) -> Iterator[tuple[int, str, str]]:
        """Timestamp, host and line of what was not read yet, stream by stream."""
        streams = log_streams.newest_first(client, LOG_GROUP, f"{self._name}/")
        for found in sorted(streams, key=lambda stream: stream.name):
            stream = self._streams.setdefault(found.name, found)
            named = _STREAM.fullmatch(stream.name)
            host = named[1] if named else _FIRST_HOST
            yield from ((event["timestamp"], host, line_of(event)) for event in stream.new_events())
