"""Checks that nodes find the lifecycle scripts in S3, unchanged, and cannot change them."""

from collections.abc import Iterator

from hyperpod_ft.aws.checks.role import Need, denied
from hyperpod_ft.aws.s3 import objects
from hyperpod_ft.aws.s3.objects import Location
from hyperpod_ft.cluster.hyperpod import lifecycle_files
from hyperpod_ft.cluster.validation.check_input import ROLE, CheckInput
from hyperpod_ft.findings import Finding, error, warning

SCRIPTS = "lifecycle scripts"  # the field of findings about those in S3: the cluster file has no key for them
_WRITES = ("s3:PutObject", "s3:DeleteObject")


def scripts(given: CheckInput) -> list[Finding]:
    """The scripts of an existing cluster, which its replaced and new nodes run, are there and as they were uploaded."""
    cluster, s3 = given.cluster(), given.clients["s3"]
    findings, folders = [], set()
    for group in cluster.get("InstanceGroups", []) if cluster else []:
        lifecycle = group.get("LifeCycleConfig", {})
        script = lifecycle.get("OnCreate") or lifecycle.get("OnInitComplete")
        if script and "SourceS3Uri" in lifecycle:
            location = Location.of(lifecycle["SourceS3Uri"])
            folders.add(str(location))
            if not objects.exists(s3, location, script):
                problem = f"the lifecycle script of group {group['InstanceGroupName']} is missing: {location}/{script}"
                findings.append(error(SCRIPTS, problem, "upload it again; without it no node can be replaced"))
    if findings:
        return findings
    return [_changed(folder, names) for folder in sorted(folders) if (names := lifecycle_files.changed(s3, folder))]


def _changed(folder: str, names: list[str]) -> Finding:
    return warning(
        SCRIPTS,
        f"{folder}: not as it was uploaded: {', '.join(names)}; new nodes would run this as root, or fail",
        "find out who may write there; `hyperpod-ft cluster create` uploads all files again and removes others",
    )


def role_only_reads(given: CheckInput) -> Iterator[Finding]:
    """The nodes' role cannot write where the scripts are, as far as its own policies say."""
    arn, bucket = given.existing.execution_role_arn, given.existing.bucket
    below = f"arn:{given.partition}:s3:::{bucket}/{lifecycle_files.PREFIX}/*"
    need = Need(_WRITES, below.replace("*", "provision.sh"))
    iam = given.clients["iam"]
    try:
        refused = {action for action, _ in denied(iam, arn, [need])}
    except iam.exceptions.NoSuchEntityException:
        return  # reported by `role`
    if not (allowed := [action for action in _WRITES if action not in refused]):
        return
    yield warning(
        ROLE,
        f"{arn.rpartition('/')[2]} may {', '.join(allowed)} on the lifecycle scripts in {bucket}: every user of a"
        " node can act as this role, and so become root on the next node",
        f"deny it {', '.join(_WRITES)} on {below}, as templates/cluster/stack.yaml does",
    )
