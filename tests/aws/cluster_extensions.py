"""Extensions of HyperPod clusters: software that HyperPod installs on every running node."""

import json
import secrets
from typing import Any

from tests.aws.clock import Process
from tests.aws.cluster_checks import invalid
from tests.aws.clusters import Cluster, find
from tests.aws.wire import AwsError, operation
from tests.aws.world import ACCOUNT, Region

_OFFERED = {"sagemaker-observability": "1.0.0"}
_DEFAULTS = {"metricsProvider": {"nodeMetrics": {"level": "BASIC"}}}


class Extension:
    def __init__(self, cluster: Cluster, name: str, settings: dict[str, Any]) -> None:
        region, self.cluster, self.name = cluster.region, cluster, name
        self.arn = f"arn:aws:sagemaker:{region.name}:{ACCOUNT}:extension/{name}/{cluster.id}/{secrets.token_hex(6)}"
        self.settings = {**_DEFAULTS, **settings}
        self.status, self.active = "Creating", 0
        self.nodes = [node for node in cluster.nodes if node.status == "Running"]
        region.world.clock.start(self.install("Creating"))

    def install(self, status: str) -> Process:
        if status == "Updating":
            yield self.cluster.region.seconds("extension.shown")
        self.status, self.active = status, 0
        yield from self.cluster.region.until_over("extension.node")
        issues = self.cluster.region.world.scenario.extension_issues
        self.active = len(self.nodes) - sum(issue["NodeCount"] for issue in issues)
        self.status = "Degraded" if issues and self.active else "CreateFailed" if issues else "Active"

    def remove(self) -> Process:
        yield self.cluster.region.seconds("extension.shown")
        self.status = "Deleting"
        yield self.cluster.region.seconds("extension.node")
        if self.cluster.region.world.scenario.extension_issues:
            self.status = "DeleteFailed"
        else:
            self.cluster.extensions.pop(self.name)


def _settings(request: dict[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads(request.get("ConfigurationValues", "{}"))
    if unknown := settings.keys() - _DEFAULTS.keys():
        raise invalid(f"Unknown settings: {', '.join(sorted(unknown))}")
    return settings


def _installed(region: Region, request: dict[str, Any]) -> Extension:
    for extension in find(region, request["ClusterArn"]).extensions.values():
        if extension.arn == request["ExtensionArn"]:
            found: Extension = extension
            return found
    raise AwsError("ResourceNotFound", f"Extension {request['ExtensionArn']} could not be found.")


@operation("sagemaker", "CreateClusterExtension")
def create_cluster_extension(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    cluster, name = find(region, request["ClusterArn"]), request["ExtensionName"]
    if not cluster.continuous or "Slurm" not in cluster.request.get("Orchestrator", {}):
        raise invalid("Extensions need a Slurm cluster with NodeProvisioningMode Continuous")
    if name not in _OFFERED:
        raise invalid(f"There is no extension {name}")
    if name in cluster.extensions:
        raise AwsError("ResourceInUse", f"Extension {name} is already installed")
    cluster.extensions[name] = Extension(cluster, name, _settings(request))
    return {"ExtensionArn": cluster.extensions[name].arn}


@operation("sagemaker", "UpdateClusterExtension")
def update_cluster_extension(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    extension = _installed(region, request)
    if extension.status == "Deleting":
        raise AwsError("ConflictException", "The extension is being deleted")
    extension.settings |= _settings(request)
    region.world.clock.start(extension.install("Updating"))
    return {"ExtensionArn": extension.arn}


@operation("sagemaker", "DeleteClusterExtension")
def delete_cluster_extension(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    extension = _installed(region, request)
    region.world.clock.start(extension.remove())
    return {"ExtensionArn": extension.arn}


@operation("sagemaker", "DescribeClusterExtension")
def describe_cluster_extension(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    extension = _installed(region, request)
    issues = region.world.scenario.extension_issues
    return {
        "ExtensionDetails": {
            **_summary(extension),
            "ClusterArn": extension.cluster.arn,
            "ConfigurationValues": json.dumps(extension.settings),
        },
        "NodeSummary": {"TotalCount": len(extension.nodes), "ActiveCount": extension.active},
        "Health": {"Issues": issues} if issues else None,
    }


@operation("sagemaker", "ListClusterExtensions")
def list_cluster_extensions(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    return {"Extensions": [_summary(one) for one in find(region, request["ClusterArn"]).extensions.values()]}


def _summary(extension: Extension) -> dict[str, Any]:
    return {
        "ExtensionArn": extension.arn,
        "ExtensionName": extension.name,
        "ExtensionVersion": _OFFERED[extension.name],
        "Status": extension.status,
    }
