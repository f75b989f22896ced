"""The differences between a cluster file and an existing cluster (pure)."""

from dataclasses import dataclass
from typing import Any

from hyperpod_ft.cluster.config import ClusterConfig
from hyperpod_ft.cluster.hyperpod.instance_groups import group_specification
from hyperpod_ft.cluster.hyperpod.request_fields import group_keys, key_of_group

_ENTRIES = ("OnCreate", "OnInitComplete")
_OPTIONAL = ("OnStartDeepHealthChecks", "TrainingPlanArn", "MinInstanceCount")


@dataclass(frozen=True)
class Changes:
    """`groups`: the instance groups that are added or get new lifecycle scripts, as `UpdateCluster` takes them.

    `added`: the number of instances of each new group. `other`: differences that `create` does not apply, a line each.
    """

    groups: tuple[dict[str, Any], ...]
    added: dict[str, int]
    other: tuple[str, ...]


def changes(config: ClusterConfig, request: dict[str, Any], described: dict[str, Any]) -> Changes:
    """Compare the request of `CreateCluster` with the answer of `DescribeCluster`.

    `create` applies new groups and new lifecycle scripts. It only reports the rest: HyperPod does not change existing
    groups, and `scale` changes counts.
    """
    existing = {group["InstanceGroupName"]: group for group in described["InstanceGroups"]}
    keys = dict(zip((group.name for group in config.groups), group_keys(config), strict=True))
    groups, added, other = [], {}, []
    for wanted in request["InstanceGroups"]:
        name = wanted["InstanceGroupName"]
        group = existing.pop(name, None)
        if group is None:
            groups.append(wanted)
            added[name] = wanted["InstanceCount"]
            continue
        now = group_specification(group)
        if now.get("LifeCycleConfig") != wanted["LifeCycleConfig"]:
            groups.append({**now, "LifeCycleConfig": wanted["LifeCycleConfig"]})
        other += [
            _difference(key_of_group(keys[name], part), now.get(part), wanted.get(part), config, name)
            for part in (*wanted, *(part for part in _OPTIONAL if part in now and part not in wanted))
            if part != "LifeCycleConfig" and not _covers(now.get(part), wanted.get(part))
        ]
    other += [
        f"instance group {name} is not in the cluster file:"
        f" hyperpod-ft cluster delete-group {config.name} {name} --region {config.region}"
        for name in existing
    ]
    if described.get("NodeRecovery", request["NodeRecovery"]) != request["NodeRecovery"]:
        mode = request["NodeRecovery"]
        command = f"hyperpod-ft cluster node-recovery {config.name} {mode} --region {config.region}"
        other.append(f"node_recovery: is {described['NodeRecovery']}, not {mode}: {command}")
    now, wanted = _database(described), _database(request)
    if not (_covers(now, wanted) if wanted else now is None):
        other.append(f"accounting_database: is {_short(now)}, not {_short(wanted)}; only the first `create` sets it")
    return Changes(tuple(groups), added, tuple(other))


def provisioning_differs(config: ClusterConfig, described: dict[str, Any]) -> bool:
    """Whether the cluster was created with the other kind of provisioning, which cannot be changed."""
    entry = "OnInitComplete" if config.provisioning == "api" else "OnCreate"
    scripts = [group.get("LifeCycleConfig", {}) for group in described["InstanceGroups"]]
    return any(key in lifecycle for lifecycle in scripts for key in _ENTRIES if key != entry)


def _database(cluster: dict[str, Any]) -> Any:
    return cluster.get("Orchestrator", {}).get("Slurm", {}).get("AccountingDatabase")


def _covers(now: Any, wanted: Any) -> bool:
    """Whether `now` contains everything in `wanted`; HyperPod may add defaults and reorder lists."""
    if isinstance(wanted, dict):
        return isinstance(now, dict) and all(_covers(now.get(key), value) for key, value in wanted.items())
    if isinstance(wanted, list):
        return isinstance(now, list) and all(any(_covers(one, value) for one in now) for value in wanted)
    return bool(now == wanted)


def _difference(key: str, now: Any, wanted: Any, config: ClusterConfig, name: str) -> str:
    if key.endswith(".count"):
        command = f"hyperpod-ft cluster scale {config.name} {name} {wanted} --region {config.region}"
        return f"{key}: {name} has {now} instances, not {wanted}: {command}"
    problem = f"{key}: {name} has {_short(now)}, not {_short(wanted)}"
    if key.endswith(".image_id"):
        command = f"update {config.name} --group {name} --image {wanted}"
    elif key.endswith(".auto_patch"):
        command = f"auto-patch {config.name} {wanted['PatchingStrategy']} --group {name}"
    else:
        return f"{problem}; cannot be changed in an existing group"
    return f"{problem}: hyperpod-ft cluster {command} --region {config.region}"


def _short(value: Any) -> str:
    return "none" if value in (None, [], {}) else str(value)
