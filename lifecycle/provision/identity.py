"""Which node of the cluster this is: the instance's id, or else its addresses, found in HyperPod's list of instances.

Instance metadata: IMDSv2 (a session token, then the id). Its addresses are of no use: an instance
of HyperPod has its first interface in AWS's network, but the list has the one in the customer's. HyperPod writes
/opt/ml/config/resource_config.json to each node, and on the API-driven path provisioning_parameters.json next to it.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import time
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Callable, Mapping

from provision.errors import NodeError, PassingError

IMDS = "http://169.254.169.254"
RESOURCE_CONFIG = "/opt/ml/config/resource_config.json"
PROVISIONING_PARAMETERS = "/opt/ml/config/provisioning_parameters.json"
RECORD = "/var/lib/provision/node.json"
_IMDS_SECONDS = 5.0

# Maps an absolute path to that path below the node's root.
Paths = Callable[[str], Path]


@dataclass(frozen=True)
class Identity:
    """One node. Addresses are those of the cluster's VPC."""

    cluster: str
    group: str
    role: str
    """controller, login or compute."""
    instance_id: str
    instance_type: str
    """As HyperPod calls it: `ml.trn1.32xlarge`."""
    address: str
    controllers: tuple[str, ...]
    """Addresses of the controllers that are known so far."""


def read_identity(path: Paths) -> Identity:
    """What step `identify` recorded. Raises NodeError if it has not run."""
    file = path(RECORD)
    try:
        data = json.loads(file.read_text())
        return Identity(**{**data, "controllers": tuple(data["controllers"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise NodeError(f"{file}: {error}", "run the step identify first") from None


def record(identity: Identity) -> str:
    """The text of the record."""
    return json.dumps(asdict(identity), indent=2) + "\n"


def ask_instance_id(seconds: float = _IMDS_SECONDS) -> str:
    """Ask the instance metadata service for up to `seconds`; "" without an id: addresses then identify the node.

    PROVISION_IMDS in the environment replaces its address.
    """
    base = os.environ.get("PROVISION_IMDS", IMDS)
    end = time.monotonic() + seconds
    while True:
        try:
            token = _http(f"{base}/latest/api/token", "PUT", {"X-aws-ec2-metadata-token-ttl-seconds": "300"})
            found = _http(f"{base}/latest/meta-data/instance-id", "GET", {"X-aws-ec2-metadata-token": token})
            if re.fullmatch(r"i-[0-9a-f]+", found):
                return found
        except (OSError, ValueError, http.client.HTTPException):
            pass  # not up yet, or not available
        if time.monotonic() >= end:
            return ""
        time.sleep(1)


def identify(instance_id: str, path: Paths, groups: Mapping[str, str]) -> Identity:
    """Find the instance in HyperPod's list: by its id, else by an address that is this machine's.

    `groups` are the roles that the cluster file gives. Raises PassingError if the list does not have the instance yet,
    NodeError if it cannot be read or the instance's group has no role.
    """
    file = path(os.environ.get("SAGEMAKER_RESOURCE_CONFIG_PATH", RESOURCE_CONFIG))
    resources = _json(file)
    found = _find(resources, instance_id)
    if found is None:
        named = f"neither {instance_id} nor" if instance_id else "no instance metadata, and not"
        raise PassingError(f"{file}: {named} any address of this machine is among the instances")
    group, entry = found
    known = {**_roles(path(PROVISIONING_PARAMETERS)), **groups}
    name = str(group["Name"])
    if name not in known:
        raise NodeError(
            f"instance group {name!r} has no role", "add it to the cluster file and run `hyperpod-ft cluster create`"
        )
    return Identity(
        cluster=str(resources.get("ClusterConfig", {}).get("ClusterName", "")),
        group=name,
        role=known[name],
        instance_id=instance_id or str(entry["InstanceId"]),
        instance_type=str(group.get("InstanceType", "")),
        address=str(entry["CustomerIpAddress"]),
        controllers=tuple(
            str(other["CustomerIpAddress"])
            for some, other in _instances(resources)
            if known.get(some["Name"]) == "controller"
        ),
    )


def _find(resources: Mapping[str, Any], instance_id: str) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
    entries = _instances(resources)
    of_id = [found for found in entries if found[1].get("InstanceId") == instance_id]
    return next(iter(of_id or [found for found in entries if _is_own(found[1]["CustomerIpAddress"])]), None)


def _instances(resources: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Each instance with its group. One that is still starting has no address and is left out."""
    return [
        (group, entry)
        for group in resources.get("InstanceGroups") or []
        for entry in group.get("Instances") or []
        if entry.get("CustomerIpAddress")
    ]


def _is_own(address: str) -> bool:
    """Whether this machine has the address: only then can a socket bind to it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _roles(file: Path) -> dict[str, str]:
    """Roles as HyperPod's own provisioning_parameters.json gives them; none if the file is missing."""
    if not file.exists():
        return {}
    parameters = _json(file)
    roles = {str(group["instance_group_name"]): "compute" for group in parameters.get("worker_groups") or []}
    for role in ("login", "controller"):
        if parameters.get(f"{role}_group"):
            roles[str(parameters[f"{role}_group"])] = role
    return roles


def _json(file: Path) -> Mapping[str, Any]:
    try:
        data = json.loads(file.read_text())
    except FileNotFoundError:
        raise PassingError(f"no file {file}", "HyperPod writes it before it runs these scripts") from None
    except ValueError as error:
        # HyperPod may be writing it at this moment.
        raise PassingError(f"{file}: {error}") from None
    if not isinstance(data, dict):
        raise NodeError(f"{file}: not a JSON object")
    return data


def _http(url: str, method: str, headers: Mapping[str, str]) -> str:
    # S310 warns about untrusted URLs; this one is fixed.
    request = urllib.request.Request(url, method=method, headers=dict(headers))  # noqa: S310
    # Without this, a proxy from the environment would be asked for the link-local address.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=5) as answer:
        return str(answer.read().decode())
