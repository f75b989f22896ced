"""`cluster doctor`: a cluster from outside, with the caller's AWS credentials."""

from collections.abc import Iterator
from dataclasses import replace

from hyperpod_ft.aws.checks.capacity import limits_of, not_listed
from hyperpod_ft.aws.session import explained
from hyperpod_ft.cluster import inspection
from hyperpod_ft.cluster.access import ClusterAccess
from hyperpod_ft.cluster.hyperpod.api import IN_SERVICE, GroupState, HyperPodCluster, Node, tally
from hyperpod_ft.cluster.inspection import ClusterOverview
from hyperpod_ft.cluster.ssh import ssm
from hyperpod_ft.cluster.validation.permission_checks import SCRIPTS
from hyperpod_ft.cluster.validation.state_checks import FOR_A_NEW_CLUSTER
from hyperpod_ft.cluster.validation.validate import validate
from hyperpod_ft.doctor.check import DoctorCheck, run_checks
from hyperpod_ft.findings import Finding, error, ok, warning


def cluster(access: ClusterAccess) -> list[Finding]:
    """A cluster's state and quotas; with its cluster file, instead of quotas all that `cluster validate` checks.

    Raises what functions of ClusterAccess do.
    """
    status = inspection.status(access)
    account = DoctorCheck("validate", lambda: _validated(access))
    if access.config is None:
        account = DoctorCheck("quotas", lambda: _quotas(access, status.cluster))
    return [*run_checks([DoctorCheck("programs for ssh", _programs)]), *_state(status), *run_checks([account])]


def _programs() -> Finding:
    ssm.require("aws", "session-manager-plugin", "ssh")
    return ok("programs for ssh", "aws, session-manager-plugin, ssh")


def _state(status: ClusterOverview) -> Iterator[Finding]:
    found, nodes = status.cluster, status.nodes
    if found.status == IN_SERVICE:
        yield ok("cluster", f"{found.name} is {found.status}")
    else:
        why = f": {found.failure}" if found.failure else ""
        yield error("cluster", f"{found.name} is {found.status}{why}", f"see hyperpod-ft cluster status {found.name}")
    for group in found.groups:
        yield _group(
            found, group, [node for node in nodes if node.group == group.name], status.missing.get(group.name, "")
        )
    for instance, text in status.warnings.items():
        yield warning(f"Slurm on {instance}", text, "see docs/cluster-day-two.md; the node may be well by now: sinfo")


def _group(found: HyperPodCluster, group: GroupState, nodes: list[Node], missing: str) -> Finding:
    row = f"group {group.name}"
    what = f"{group.current} of {group.target} {group.instance_type}: {tally(nodes) or 'no nodes'}"
    if failed := [node for node in nodes if node.failed]:
        remedy = f"see hyperpod-ft cluster logs {found.name} --node {failed[0].instance_id}"
        return error(row, f"{what}; {failed[0].instance_id}: {failed[0].message or 'failed'}", remedy)
    if group.current < group.target:
        why = missing or next((node.message for node in nodes if node.message), "AWS may have no capacity")
        remedy = (
            "HyperPod keeps requesting the others" if found.continuous else "see hyperpod-ft cluster status --nodes"
        )
        return error(row, f"{what}; {why}", remedy)
    return ok(row, what)


def _validated(access: ClusterAccess) -> Iterator[Finding]:
    assert access.config is not None
    checked = validate(access.config, access.session.client)
    # that the cluster exists is the point here, not a warning
    yield from (_of_existing(found) for found in checked.findings if found.remedy != FOR_A_NEW_CLUSTER)
    yield ok("validate", f"{len(checked.done)} checks: {', '.join(checked.done)}")
    yield from (warning("validate", skipped) for skipped in checked.skipped)


def _of_existing(finding: Finding) -> Finding:
    # changed scripts are no error of `cluster validate`, since `cluster create` uploads them again
    return replace(finding, verdict="error") if finding.name == SCRIPTS else finding


def _quotas(access: ClusterAccess, found: HyperPodCluster) -> Iterator[Finding]:
    """The quota of each instance type, against what this cluster has."""
    with explained("quotas"):
        limits = limits_of(access.session.client("service-quotas"), "sagemaker")
    for name in dict.fromkeys(group.instance_type for group in found.groups):
        wanted = sum(group.target for group in found.groups if group.instance_type == name)
        quota, row = f"{name} for cluster usage", f"quota of {name}"
        if quota not in limits:
            yield warning(row, *not_listed(quota))
        elif limits[quota]["Value"] < wanted:
            what = f"`{quota}` is {limits[quota]['Value']:g}, and this cluster wants {wanted}"
            yield error(row, what, "request an increase in the Service Quotas console")
        else:
            yield ok(row, f"{limits[quota]['Value']:g}, of which this cluster wants {wanted}")
