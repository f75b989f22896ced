"""HyperPod's logs of a cluster's nodes in CloudWatch. `client` is boto3's for logs throughout.

In the log group `/aws/sagemaker/Clusters/<name>/<id>`, the stream `LifecycleConfig/<group>/<instance id>` has the
output of a node's lifecycle scripts.
"""

from collections.abc import Iterator
from typing import Any

from hyperpod_ft.aws import log_streams
from hyperpod_ft.aws.hyperpod.api import Cluster
from hyperpod_ft.aws.hyperpod.nodes import Node
from hyperpod_ft.aws.log_streams import LogStream


def log_group(cluster: Cluster) -> str:
    return f"/aws/sagemaker/Clusters/{cluster.name}/{cluster.id}"


def lifecycle_streams(client: Any, cluster: Cluster) -> list[str]:
    """The streams of every node that ever ran lifecycle scripts, the most recently written first."""
    return [stream.name for stream in log_streams.newest_first(client, log_group(cluster), "LifecycleConfig/")]


def lines(client: Any, cluster: Cluster, stream: str, follow: bool = False) -> Iterator[str]:
    """The lines of a stream, oldest first; with `follow`, waits for more without end. None if the stream is missing."""
    return LogStream(client, log_group(cluster), stream).lines(follow=follow)


def stream_of(node: Node) -> str:
    return f"LifecycleConfig/{node.group}/{node.instance_id}"
