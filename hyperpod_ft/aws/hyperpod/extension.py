"""HyperPod's observability extension: AWS's own collectors on every node. `client` is boto3's for sagemaker."""

import uuid
from dataclasses import dataclass
from typing import Any

NAME = "sagemaker-observability"
ACTIVE = "Active"
_CHANGING = ("Creating", "Updating", "Deleting")


@dataclass(frozen=True)
class Extension:
    """An installed extension. `status` is ExtensionStatus: Creating, Active, Degraded, CreateFailed, ..."""

    arn: str
    version: str
    status: str
    active: int  # nodes that run this version and these settings
    total: int
    issues: tuple[str, ...]
    settings: str  # JSON, with the defaults

    @property
    def changing(self) -> bool:
        return self.status in _CHANGING


def find(client: Any, cluster_arn: str) -> Extension | None:
    """The extension of a cluster; None if it is not installed."""
    pages = client.get_paginator("list_cluster_extensions").paginate(ClusterArn=cluster_arn)
    arns = [one["ExtensionArn"] for page in pages for one in page["Extensions"] if one["ExtensionName"] == NAME]
    if not arns:
        return None
    try:
        described = client.describe_cluster_extension(ClusterArn=cluster_arn, ExtensionArn=arns[0])
    except client.exceptions.ResourceNotFound:
        return None  # removed meanwhile
    details, nodes = described["ExtensionDetails"], described.get("NodeSummary", {})
    issues = described.get("Health", {}).get("Issues", [])
    return Extension(
        arn=details["ExtensionArn"],
        version=details["ExtensionVersion"],
        status=details["Status"],
        active=nodes.get("ActiveCount", 0),
        total=nodes.get("TotalCount", 0),
        issues=tuple(f"{one['NodeCount']} nodes: {one['Code']}: {one['Message']}" for one in issues),
        settings=details.get("ConfigurationValues", ""),
    )


def install(client: Any, cluster_arn: str, installed: Extension | None, settings: str | None) -> None:
    """Install the newest version, or change the settings of the installed one; without any, it tries again on nodes
    where it failed. `settings`: JSON."""
    given = {"ConfigurationValues": settings} if settings else {}
    token = uuid.uuid4().hex  # botocore may send a request again whose answer was lost
    if installed is None:
        client.create_cluster_extension(ClusterArn=cluster_arn, ExtensionName=NAME, ClientToken=token, **given)
    else:
        client.update_cluster_extension(ClusterArn=cluster_arn, ExtensionArn=installed.arn, ClientToken=token, **given)


def remove(client: Any, cluster_arn: str, installed: Extension) -> None:
    client.delete_cluster_extension(ClusterArn=cluster_arn, ExtensionArn=installed.arn)
