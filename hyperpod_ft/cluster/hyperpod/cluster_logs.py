"""HyperPod's logs of a cluster's nodes in CloudWatch. `client` is boto3's for logs throughout.

In the log group `/aws/sagemaker/Clusters/<name>/<id>`, the stream `LifecycleConfig/<group>/<instance id>` has the
output of a node's lifecycle scripts.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from hyperpod_ft.aws import log_streams
from hyperpod_ft.aws.log_streams import LogStream
from hyperpod_ft.aws.session import explained
from hyperpod_ft.cluster.hyperpod.api import HyperPodCluster
from hyperpod_ft.cluster.hyperpod.nodes import Node
from hyperpod_ft.errors import UserError

_LIFECYCLE = "LifecycleConfig/"
_SLURM_WARNING = "slurm: warning"  # lifecycle/provision/journal.py writes it


def log_group(cluster: HyperPodCluster) -> str:
    return f"/aws/sagemaker/Clusters/{cluster.name}/{cluster.id}"


def lifecycle_streams(client: Any, cluster: HyperPodCluster) -> list[str]:
    """The streams of every node that ever ran lifecycle scripts, the most recently written first."""
    return [stream.name for stream in log_streams.newest_first(client, log_group(cluster), _LIFECYCLE)]


def lines(client: Any, cluster: HyperPodCluster, stream: str, follow: bool = False) -> Iterator[str]:
    """The lines of a stream, oldest first; with `follow`, waits for more without end. None if the stream is missing."""
    return LogStream(client, log_group(cluster), stream).lines(follow=follow)


def slurm_warnings(client: Any, cluster: HyperPodCluster, nodes: Sequence[Node]) -> dict[str, str]:
    """What the scripts' step `slurm` warned of when these nodes were provisioned, the last of each, by instance id.

    Instead of them, why CloudWatch cannot be asked.
    """
    found: dict[str, str] = {}
    pages = client.get_paginator("filter_log_events").paginate(
        logGroupName=log_group(cluster), logStreamNamePrefix=_LIFECYCLE, filterPattern=f'"{_SLURM_WARNING}"'
    )
    try:
        with explained("logs"), suppress(client.exceptions.ResourceNotFoundException):
            for event in sorted((one for page in pages for one in page["events"]), key=lambda one: one["timestamp"]):
                instance = event["logStreamName"].rpartition("/")[2]
                found[instance] = event["message"].partition(_SLURM_WARNING)[2].partition(": ")[2].rstrip()
    except UserError as error:
        return {"lifecycle log": str(error)}
    return {node.instance_id: found[node.instance_id] for node in nodes if node.instance_id in found}


def stream_of(node: Node) -> str:
    return f"{_LIFECYCLE}{node.group}/{node.instance_id}"
