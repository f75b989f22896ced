"""HyperPod's logs of a cluster's nodes in CloudWatch. `client` is boto3's for logs throughout.

In the log group `/aws/sagemaker/Clusters/<name>/<id>`, the stream `LifecycleConfig/<group>/<instance id>` has the
output of a node's lifecycle scripts.
"""

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from hyperpod_ft.aws.hyperpod.api import Cluster
from hyperpod_ft.aws.hyperpod.nodes import Node

_POLL_SECONDS = 5.0


def log_group(cluster: Cluster) -> str:
    return f"/aws/sagemaker/Clusters/{cluster.name}/{cluster.id}"


def lifecycle_streams(client: Any, cluster: Cluster) -> list[str]:
    """The streams of every node that ever ran lifecycle scripts, the most recently written first."""
    pages = client.get_paginator("describe_log_streams").paginate(
        logGroupName=log_group(cluster), logStreamNamePrefix="LifecycleConfig/"
    )
    streams: list[dict[str, Any]] = []
    with suppress(client.exceptions.ResourceNotFoundException):
        streams = [stream for page in pages for stream in page["logStreams"]]
    # CloudWatch may report a stream's last event only after an hour, but its creation at once
    streams.sort(key=lambda stream: max(stream.get("lastEventTimestamp", 0), stream["creationTime"]), reverse=True)
    return [stream["logStreamName"] for stream in streams]


def lines(client: Any, cluster: Cluster, stream: str, follow: bool = False) -> Iterator[str]:
    """The lines of a stream, oldest first; with `follow`, waits for more without end. None if the stream is missing."""
    token: dict[str, str] = {}
    while True:
        page: dict[str, Any] = {}
        with suppress(client.exceptions.ResourceNotFoundException):
            page = client.get_log_events(
                logGroupName=log_group(cluster), logStreamName=stream, startFromHead=True, **token
            )
        yield from (event["message"].rstrip("\n") for event in page.get("events", []))
        # at the end CloudWatch returns the token that it was given
        at_end = not page or page["nextForwardToken"] == token.get("nextToken")
        if at_end and not follow:
            return
        if page:
            token = {"nextToken": page["nextForwardToken"]}
        if at_end:
            time.sleep(_POLL_SECONDS)


def stream_of(node: Node) -> str:
    return f"LifecycleConfig/{node.group}/{node.instance_id}"
