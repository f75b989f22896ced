"""Check cluster-config.json and provisioning_parameters.json that were written by hand, as for AWS's samples.

A finding's `field` is the file and the place in it. The checks are those of AWS's validate-config.py that need no
account, and some that it lacks: missing groups, duplicate names, a worker group that is also the controller's.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hyperpod_ft.aws.findings import Finding, error, warning
from hyperpod_ft.aws.validation.offline_checks import BUCKET_START
from hyperpod_ft.aws.validation.service_model import check_request
from hyperpod_ft.errors import did_you_mean

# The keys that lifecycle_script.py of AWS's samples and HyperPod's agent read.
_KEYS = (
    "version",
    "workload_manager",
    "controller_group",
    "login_group",
    "worker_groups",
    "fsx_dns_name",
    "fsx_mountname",
    "fsx_openzfs_dns_name",
    "slurm_configurations",
)
_ASK_FSX = "look it up: aws fsx describe-file-systems"
_REQUIRED = ("version", "workload_manager", "controller_group", "worker_groups")


def validate_handwritten(cluster_config: Path, provisioning_parameters: Path | None = None) -> list[Finding]:
    """Check both files, or only the first if HyperPod sets up Slurm itself (`SlurmConfig` in every group)."""
    request, findings = _read(cluster_config)
    if request is None:
        return findings
    findings += _request(cluster_config.name, request)
    groups = _groups(request)
    if provisioning_parameters is None:
        if not any("SlurmConfig" in group for group in groups):
            findings.append(_no_roles(cluster_config.name))
        return findings
    parameters, unread = _read(provisioning_parameters)
    findings += unread
    if parameters is not None:
        where = provisioning_parameters.name
        if any("SlurmConfig" in group for group in groups):
            problem = "has groups with a SlurmConfig, so HyperPod sets up Slurm and writes {where} itself"
            findings.append(warning(cluster_config.name, problem, f"remove either SlurmConfig or {where}"))
        findings += [*_keys(where, parameters), *_roles(where, parameters, groups), *_lustre(where, parameters)]
    return findings


def _no_roles(where: str) -> Finding:
    remedy = "add a SlurmConfig to every group, or pass the other file with --provisioning-parameters"
    return error(where, "has no group with a role: controller, login or compute", remedy)


def _read(path: Path) -> tuple[dict[str, Any] | None, list[Finding]]:
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as problem:
        return None, [error(path.name, f"cannot be read: {problem}", "pass a readable JSON file")]
    except json.JSONDecodeError as problem:
        return None, [error(f"{path.name}:{problem.lineno}", f"is not valid JSON: {problem.msg}", "correct it")]
    if not isinstance(value, dict):
        return None, [error(path.name, "is not a JSON object", "start from AWS's sample")]
    return value, []


def _groups(request: dict[str, Any]) -> list[dict[str, Any]]:
    groups = request.get("InstanceGroups", [])
    return [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []


def _request(where: str, request: dict[str, Any]) -> list[Finding]:
    findings = []
    for path, message in check_request("sagemaker", "CreateCluster", request):
        problem, _, remedy = message.partition("; ")
        findings.append(error(f"{where}: {path}" if path else where, problem, remedy or "correct it"))
    groups = _groups(request)
    names = [group.get("InstanceGroupName") for group in groups]
    for index, group in enumerate(groups):
        at = f"{where}: InstanceGroups[{index}]"
        if group.get("InstanceGroupName") in names[:index]:
            problem = f"a second group is named {group['InstanceGroupName']}"
            findings.append(error(f"{at}.InstanceGroupName", problem, "give each group its own name"))
        uri = (group.get("LifeCycleConfig") or {}).get("SourceS3Uri", "")
        if uri and not str(uri).startswith(f"s3://{BUCKET_START}"):
            problem = f"HyperPod reads lifecycle scripts only from s3://{BUCKET_START}..., not from {uri}"
            findings.append(
                error(f"{at}.LifeCycleConfig.SourceS3Uri", problem, f"use a bucket named {BUCKET_START}...")
            )
    if "VpcConfig" not in request:
        problem = "is missing, so the nodes are in AWS's network and cannot reach your FSx"
        findings.append(warning(f"{where}: VpcConfig", problem, "add a subnet and a security group"))
    return findings + list(_slurm(where, request, groups))


def _slurm(where: str, request: dict[str, Any], groups: list[dict[str, Any]]) -> Iterator[Finding]:
    """The API-driven form: every group has a Slurm role, and exactly one is the controller."""
    kinds = [(group.get("SlurmConfig") or {}).get("NodeType") for group in groups]
    slurm = "Slurm" in (request.get("Orchestrator") or {})
    if not slurm and not any(kinds):
        return
    for index, kind in enumerate(kinds):
        if kind is None:
            yield error(
                f"{where}: InstanceGroups[{index}].SlurmConfig",
                "is missing, although HyperPod sets up Slurm",
                "add a NodeType: Controller, Login or Compute",
            )
    controllers = [group for group, kind in zip(groups, kinds, strict=True) if kind == "Controller"]
    if len(controllers) != 1:
        problem = f"{len(controllers)} groups with NodeType Controller"
        yield error(f"{where}: InstanceGroups", problem, "give exactly one group the NodeType Controller")
    for group in controllers:
        if group.get("InstanceCount") != 1:
            problem = (
                f"the controller group {group.get('InstanceGroupName')} has {group.get('InstanceCount')} instances"
            )
            yield error(f"{where}: InstanceGroups", problem, "set its InstanceCount to 1")


def _keys(where: str, parameters: dict[str, Any]) -> Iterator[Finding]:
    for key in _REQUIRED:
        if key not in parameters:
            yield error(f"{where}: {key}", "is missing", "add it")
    for key in parameters.keys() - set(_KEYS):
        hint = did_you_mean(key, _KEYS).removeprefix("; ")
        yield warning(f"{where}: {key}", "nothing reads this key", hint or f"known keys: {', '.join(_KEYS)}")
    if parameters.get("workload_manager", "slurm") != "slurm":
        yield error(f"{where}: workload_manager", f"is {parameters['workload_manager']!r}", "set `slurm`")


def _roles(where: str, parameters: dict[str, Any], groups: list[dict[str, Any]]) -> Iterator[Finding]:
    """Every name is that of a group, and every group has exactly one role."""
    counts = {str(group.get("InstanceGroupName")): group.get("InstanceCount") for group in groups}
    taken: dict[str, str] = {}
    for key, name in _named(parameters):
        if name not in counts:
            hint = did_you_mean(str(name), counts).removeprefix("; ")
            yield error(f"{where}: {key}", f"no instance group {name}", hint or f"groups: {', '.join(counts)}")
        elif name in taken:
            yield error(
                f"{where}: {key}", f"{name} is already used as {taken[name]}", "use a different group for each role"
            )
        taken.setdefault(name, key)
    controller = parameters.get("controller_group")
    if counts.get(str(controller), 1) != 1:
        problem = f"{controller} has {counts[str(controller)]} instances"
        yield error(f"{where}: controller_group", problem, "set its InstanceCount to 1: slurmctld runs on one node")
    for name in counts.keys() - taken.keys():
        yield warning(where, f"has no role for the group {name}", "add it to worker_groups, or as login_group")


def _named(parameters: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for key in ("controller_group", "login_group"):
        if parameters.get(key):
            yield key, str(parameters[key])
    workers = parameters.get("worker_groups", [])
    for index, group in enumerate(workers if isinstance(workers, list) else []):
        if isinstance(group, dict) and "instance_group_name" in group:
            yield f"worker_groups[{index}]", str(group["instance_group_name"])


def _lustre(where: str, parameters: dict[str, Any]) -> Iterator[Finding]:
    dns, mount = parameters.get("fsx_dns_name"), parameters.get("fsx_mountname")
    if bool(dns) != bool(mount):
        missing = "fsx_mountname" if dns else "fsx_dns_name"
        yield error(f"{where}: {missing}", "is missing, so /fsx is not mounted", _ASK_FSX)
    if dns and not re.fullmatch(r"fs-[0-9a-f]{8,17}\.fsx\.[a-z0-9-]+\.amazonaws\.com(\.cn)?", str(dns)):
        yield error(
            f"{where}: fsx_dns_name", f"{dns!r} is not an FSx DNS name", "write it as fs-ID.fsx.REGION.amazonaws.com"
        )
    if mount and not re.fullmatch(r"[A-Za-z0-9_-]{1,8}", str(mount)):
        yield error(f"{where}: fsx_mountname", f"{mount!r} is not an FSx mount name", _ASK_FSX)
