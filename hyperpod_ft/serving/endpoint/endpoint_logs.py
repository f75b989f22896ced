"""What an endpoint's containers printed, in CloudWatch. `client` is boto3's for logs throughout.

The log group is `/aws/sagemaker/Endpoints/<endpoint>`, with a stream for each instance, or
`/aws/sagemaker/InferenceComponents/<component>`, with a stream for each copy.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from hyperpod_ft.aws import log_streams


def log_group(endpoint: str, component: str | None = None) -> str:
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
