"""HyperPod's observability extension of a cluster: AWS's own collectors on every node.

Functions raise what those of ClusterAccess do; a `timeout` is in minutes, `client` is boto3's for sagemaker.
"""

import json
import uuid
from dataclasses import dataclass
from typing import Any

from hyperpod_ft.aws.session import paged
from hyperpod_ft.cluster.access import ClusterAccess
from hyperpod_ft.cluster.hyperpod.waiting import Seen
from hyperpod_ft.errors import UserError

_MAX_SETTINGS = 10_240  # characters, from botocore's model
_NAME = "sagemaker-observability"
_ACTIVE = "Active"
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


def installed(access: ClusterAccess) -> Extension | None:
    return _find(access.sagemaker, access.cluster().arn)


def install(access: ClusterAccess, settings: str | None, timeout: float | None) -> None:
    """Install it or change its settings, a JSON object; with a timeout, wait until all nodes run it."""
    if settings is not None:
        _check(settings)
    cluster = access.cluster()
    arn = cluster.arn
    if cluster.kubernetes or not cluster.continuous:
        raise UserError(
            f"cluster {access.name}: HyperPod has extensions only for Slurm clusters with continuous provisioning",
            "create a cluster with provisioning: api and continuous_provisioning: true",
        )
    before = _find(access.sagemaker, arn)
    _request(access.sagemaker, arn, before, settings)
    access.report(f"{_NAME}: requested")
    if timeout is not None:
        found = _settled(access, arn, before, timeout)
        if found is None or found.status != _ACTIVE:
            raise _failed(found, "fix the cause, then run the command again, which tries again on those nodes")


def remove(access: ClusterAccess, timeout: float | None) -> None:
    """Remove it; with a timeout, wait until no node runs it."""
    arn = access.cluster().arn
    before = _find(access.sagemaker, arn)
    if before is None:
        access.report(f"{_NAME}: not installed")
        return
    access.sagemaker.delete_cluster_extension(ClusterArn=arn, ExtensionArn=before.arn)
    access.report(f"{_NAME}: removal requested")
    if timeout is not None and (found := _settled(access, arn, before, timeout)):
        raise _failed(found, "fix the cause, then run the command again")


def _settled(access: ClusterAccess, arn: str, before: Extension | None, timeout: float) -> Extension | None:
    """The extension once HyperPod has stopped changing it; None if it is gone. `before`: what it was."""

    def look() -> Seen[Extension | None]:
        found = _find(access.sagemaker, arn)
        state = f"{found.status}, {found.active} of {found.total} nodes" if found else _status(None)
        begun = _status(found) != _status(before)
        return Seen(found, {_NAME: state}, begun, changing=found is not None and found.changing)

    return access.wait_for_change(look, timeout, "observability")[0]


def _failed(found: Extension | None, remedy: str) -> UserError:
    reasons = "; ".join(found.issues if found else ())
    return UserError(f"{_NAME}: {_status(found)}: {reasons or 'no reason given'}", remedy)


def _status(found: Extension | None) -> str:
    return found.status if found else "not installed"


def _check(settings: str) -> None:
    try:
        value = json.loads(settings)
    except ValueError as error:
        raise UserError(f"--settings: not JSON: {error}", "pass a JSON object") from None
    if not isinstance(value, dict) or len(settings) > _MAX_SETTINGS:
        raise UserError(
            f"--settings: not a JSON object of at most {_MAX_SETTINGS:,} characters", "pass a shorter JSON object"
        )


def _find(client: Any, cluster_arn: str) -> Extension | None:
    """The extension of a cluster; None if it is not installed."""
    installed = paged(client, "list_cluster_extensions", "Extensions", ClusterArn=cluster_arn)
    arns = [one["ExtensionArn"] for one in installed if one["ExtensionName"] == _NAME]
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


def _request(client: Any, cluster_arn: str, installed: Extension | None, settings: str | None) -> None:
    """Install the newest version, or change the settings of the installed one; without any, it tries again on nodes
    where it failed. `settings`: JSON."""
    given = {"ConfigurationValues": settings} if settings else {}
    token = uuid.uuid4().hex  # botocore may send a request again whose answer was lost
    if installed is None:
        client.create_cluster_extension(ClusterArn=cluster_arn, ExtensionName=_NAME, ClientToken=token, **given)
    else:
        client.update_cluster_extension(ClusterArn=cluster_arn, ExtensionArn=installed.arn, ClientToken=token, **given)
