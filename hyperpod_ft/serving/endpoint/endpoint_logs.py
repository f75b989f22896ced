"""What an endpoint's containers printed, in CloudWatch. `client` is boto3's for logs throughout.

The log group is `/aws/sagemaker/Endpoints/<endpoint>`, with a stream for each instance, or
`/aws/sagemaker/InferenceComponents/<component>`, with a stream for each copy.
"""

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

_POLL_SECONDS = 5.0


def log_group(endpoint: str, component: str | None = None) -> str:
    return f"/aws/sagemaker/InferenceComponents/{component}" if component else f"/aws/sagemaker/Endpoints/{endpoint}"


def tail(client: Any, group: str, count: int) -> list[str]:
    """The last lines of the stream that was written last; none when the container printed nothing yet."""
    stream = _newest_stream(client, group)
    if stream is None:
        return []
    # without startFromHead the first page is the newest
    page = client.get_log_events(logGroupName=group, logStreamName=stream, limit=count)
    return [event["message"].rstrip("\n") for event in page["events"]]


def lines(client: Any, group: str, *, follow: bool) -> Iterator[str]:
    """Every line of the stream that was written last, oldest first; with `follow`, waits for more without end."""
    token: dict[str, str] = {}
    stream = _newest_stream(client, group)
    while stream is None and follow:
        time.sleep(_POLL_SECONDS)
        stream = _newest_stream(client, group)
    while stream is not None:
        page = client.get_log_events(logGroupName=group, logStreamName=stream, startFromHead=True, **token)
        yield from (event["message"].rstrip("\n") for event in page["events"])
        # at the end CloudWatch returns the token that it was given
        at_end = page["nextForwardToken"] == token.get("nextToken")
        if at_end and not follow:
            return
        token = {"nextToken": page["nextForwardToken"]}
        if at_end:
            time.sleep(_POLL_SECONDS)


def delete(client: Any, group: str) -> None:
    """Delete the log group: CloudWatch bills for what it stores, without end."""
    with suppress(client.exceptions.ResourceNotFoundException):
        client.delete_log_group(logGroupName=group)


def _newest_stream(client: Any, group: str) -> str | None:
    streams: list[dict[str, Any]] = []
    with suppress(client.exceptions.ResourceNotFoundException):
        pages = client.get_paginator("describe_log_streams").paginate(logGroupName=group)
        streams = [stream for page in pages for stream in page["logStreams"]]
    # CloudWatch may report a stream's last event only after an hour, but its creation at once
    streams.sort(key=lambda stream: max(stream.get("lastEventTimestamp", 0), stream["creationTime"]))
    return str(streams[-1]["logStreamName"]) if streams else None
