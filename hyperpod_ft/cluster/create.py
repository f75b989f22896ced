"""From a cluster file to a cluster. Each step first looks at what exists, so an interrupted `create` can be rerun."""

from typing import Any

from hyperpod_ft.aws.s3 import objects
from hyperpod_ft.aws.s3.objects import Location
from hyperpod_ft.aws.session import Session, error_code, error_message
from hyperpod_ft.aws.stacks import POLL_SECONDS, describe, in_progress, outputs, parameters
from hyperpod_ft.cluster.access import ClusterAccess
from hyperpod_ft.cluster.config import ClusterConfig
from hyperpod_ft.cluster.hyperpod import api, lifecycle_files, requests
from hyperpod_ft.cluster.hyperpod.api import HyperPodCluster
from hyperpod_ft.cluster.hyperpod.changes import changes, provisioning_differs
from hyperpod_ft.cluster.hyperpod.waiting import Awaited
from hyperpod_ft.cluster.stack import stack
from hyperpod_ft.cluster.stack.resources import ClusterResources, is_kept, of_existing
from hyperpod_ft.cluster.validation.validate import validate
from hyperpod_ft.errors import UserError
from hyperpod_ft.progress import PrintLine, pause

_ROLE_ATTEMPTS = 12


def create(access: ClusterAccess, config: ClusterConfig, timeout: float | None) -> HyperPodCluster | None:
    """Validate, then create what is missing. Returns the complete cluster, or None without waiting.

    `timeout`: in minutes; None: do not wait. Raises what functions of ClusterAccess do, also for errors that validation
    finds.
    """
    found = validate(config, access.session.client)
    for finding in found.findings:
        access.report(str(finding))
    if found.has_errors:
        raise UserError(f"cluster {config.name}: validation failed, nothing was created", "fix the errors above")
    requested = create_missing(access, config)
    return access.wait(timeout, Awaited(targets=requested))


def create_missing(access: ClusterAccess, config: ClusterConfig) -> dict[str, int]:
    """Create what is missing of stack, lifecycle files and cluster; does not wait for the cluster's nodes.

    An existing cluster keeps its instance groups; missing groups are added, and new nodes run the new lifecycle
    files. Returns the number of instances requested for each group. Raises what functions of ClusterAccess do, also
    for a cluster of this name that this cluster file did not create.
    """
    session, report = access.session, access.report
    # fail before anything costs money
    _describe_ours(access, config, stack.subnet_id(config, session.client("cloudformation")))
    resources = _ensure_resources(access, config)
    content = lifecycle_files.files(config, resources)
    uri = f"s3://{resources.bucket}/{upload(config, resources.bucket, content, session.client('s3'), report)}"
    wanted = requests.create_cluster(config, resources, uri)
    described = _describe_ours(access, config, resources.subnet_id)
    if described is None and _create_cluster(access, config, wanted):
        report(f"cluster {config.name}: requested {_instances(config)}; billed by the hour from now on")
        return {group.name: group.count for group in config.groups}
    described = described or _describe_ours(access, config, resources.subnet_id)
    assert described is not None, "CreateCluster answered ResourceInUse"
    return _bring_up_to_date(access, config, wanted, described)


def _describe_ours(access: ClusterAccess, config: ClusterConfig, subnet_id: str) -> dict[str, Any] | None:
    """DescribeCluster's answer. Raises UserError for a cluster that does not belong to this cluster file."""
    described = api.describe(access.sagemaker, config.name)
    if described is None:
        return None
    if problem := api.not_ours(api.of_description(described), subnet_id):
        raise UserError(problem, "choose another name in the cluster file")
    if provisioning_differs(config, described):
        other = {"api": "legacy", "legacy": "api"}[config.provisioning]
        raise UserError(
            f"cluster {config.name} was created with provisioning: {other}, which cannot be changed",
            f"set provisioning: {other}",
        )
    return described


def _require_deployed(session: Session, config: ClusterConfig) -> None:
    """Raise UserError if `delete` has reduced or deleted the stack or its file system meanwhile.

    Right before each CreateCluster: a `delete` that begins later looks for the cluster after it has changed the stack.
    """
    if config.existing is not None:
        return
    found = describe(session.client("cloudformation"), config.stack_name)
    complete = found is not None and not in_progress(found["StackStatus"]) and parameters(found)["NatGateway"] == "true"
    if found is None or not complete or not is_kept(session, outputs(found).get("FsxId", "")):
        raise UserError(
            f"stack {config.stack_name}: was deleted meanwhile, by `cluster delete`; the cluster was not created",
            "create it again",
        )


def _create_cluster(access: ClusterAccess, config: ClusterConfig, request: dict[str, Any]) -> bool:
    """False if the cluster exists: created by another command, or by this request when its first answer was lost.

    A new IAM role takes seconds to propagate; until then HyperPod cannot assume it.
    """
    sagemaker = access.sagemaker
    for attempt in range(_ROLE_ATTEMPTS):
        _require_deployed(access.session, config)
        try:
            sagemaker.create_cluster(**request)
            break
        except sagemaker.exceptions.ClientError as error:
            if error_code(error) == "ResourceInUse":
                return False
            message = error_message(error).lower()
            unknown = error_code(error) == "ValidationException" and "assume" in message and "role" in message
            if not unknown or attempt == _ROLE_ATTEMPTS - 1:
                raise
        pause(POLL_SECONDS)
    return True


def _bring_up_to_date(
    access: ClusterAccess, config: ClusterConfig, request: dict[str, Any], described: dict[str, Any]
) -> dict[str, int]:
    name, status, report = config.name, described["ClusterStatus"], access.report
    found = changes(config, request, described)
    report(f"cluster {name}: already exists, {status}")
    for line in found.other:
        report(f"cluster {name}: differs from the cluster file: {line}")
    if not found.groups:
        return {}
    if status != api.IN_SERVICE:
        report(
            f"cluster {name}: takes new groups and lifecycle scripts only when InService; run `create` again once it is"
        )
        return {}
    access.sagemaker.update_cluster(ClusterName=name, InstanceGroups=list(found.groups))
    if len(found.added) < len(found.groups):
        report(
            f"cluster {name}: new nodes run the new lifecycle scripts; to run them on existing ones:"
            " docs/cluster-day-two.md"
        )
    for group, count in found.added.items():
        report(f"cluster {name}: requested {count} instances for the new group {group}; billed by the hour from now on")
    return found.added


def _ensure_resources(access: ClusterAccess, config: ClusterConfig) -> ClusterResources:
    """Deploy the stack, or look up the existing resources that the cluster file names."""
    if config.existing is not None:
        return of_existing(config.existing, access.session)
    access.report(f"stack {config.stack_name}: its NAT gateway, file system and bucket cost money")
    return stack.deploy(access.session, config, access.report)


def upload(config: ClusterConfig, bucket: str, content: dict[str, bytes], s3: Any, report: PrintLine) -> str:
    """Upload the lifecycle files to their folder of the bucket, the entry script last; returns the folder.

    Removes what else is there: nodes refuse a folder with modules that the manifest lacks.
    """
    folder = lifecycle_files.folder(config, content)
    content = {**content, lifecycle_files.MANIFEST: lifecycle_files.manifest(content)}
    url = f"s3://{bucket}/{folder}"
    for name in sorted(content, key=lambda name: name == requests.ENTRY):
        objects.write(s3, url, name, content[name])
    if added := {entry.name for entry in objects.entries(s3, Location.of(url))} - content.keys():
        report(f"lifecycle: removing what is not the kit's: {', '.join(sorted(added))}")
        objects.remove(s3, url, added)
    report(f"lifecycle: {len(content)} files in {url}")
    return folder


def _instances(config: ClusterConfig) -> str:
    return ", ".join(f"{group.count} {group.instance_type}" for group in config.groups)
