"""From a cluster file to a cluster. Each step looks at what is there first, so that a run goes on from any other."""

import time
from typing import Any

from hyperpod_ft.aws.hyperpod import api, lifecycle_files, requests
from hyperpod_ft.aws.hyperpod.changes import changes, provisioning_differs
from hyperpod_ft.aws.hyperpod.waiting import Say
from hyperpod_ft.aws.session import Session, error_code, error_message, explained
from hyperpod_ft.aws.stack import stack
from hyperpod_ft.aws.stack.foundation import Foundation, of_existing
from hyperpod_ft.aws.stack.stack import POLL_SECONDS, StackParameters
from hyperpod_ft.config.cluster_config import ClusterConfig
from hyperpod_ft.errors import UserError

_ROLE_ATTEMPTS = 12


def create(config: ClusterConfig, session: Session, say: Say, poll_seconds: float = POLL_SECONDS) -> dict[str, int]:
    """Make what is missing of stack, lifecycle files and cluster; does not wait for the cluster's nodes.

    A cluster that is there keeps the instance groups it has; groups it lacks are added, and nodes to come run the new
    lifecycle files. Returns how many instances of which groups it asked for. Raises UserError, also for a cluster of
    this name that somebody else made.
    """
    with explained(f"cluster {config.name}"):
        sagemaker = session.client("sagemaker")
        # before anything costs money
        _find(sagemaker, config, stack.subnet_id(config, session.client("cloudformation")))
        base = lay_foundation(config, session, say, poll_seconds)
        content = lifecycle_files.files(config, base)
        uri = f"s3://{base.bucket}/{upload(config, base.bucket, content, session.client('s3'), say)}"
        request = requests.create_cluster(config, base, uri)
        described = _find(sagemaker, config, base.subnet_id)
        if described is None and _create_cluster(sagemaker, request, poll_seconds):
            say(f"cluster {config.name}: asked for {_instances(config)}; they are billed by the hour from now on")
            return {group.name: group.count for group in config.groups}
        described = described or _find(sagemaker, config, base.subnet_id)
        assert described is not None, "HyperPod has just said that it exists"
        return _bring_up_to_date(config, request, described, sagemaker, say)


def _find(sagemaker: Any, config: ClusterConfig, subnet_id: str) -> dict[str, Any] | None:
    """What DescribeCluster says. Raises UserError for a cluster that is not the cluster file's."""
    described = api.describe(sagemaker, config.name)
    if described is None:
        return None
    if problem := api.not_ours(api.of_description(described), subnet_id):
        raise UserError(problem, "choose another name in the cluster file")
    if provisioning_differs(config, described):
        other = {"api": "legacy", "legacy": "api"}[config.provisioning]
        raise UserError(
            f"cluster {config.name} was made with provisioning {other}, which stays", f"set provisioning: {other}"
        )
    return described


def _create_cluster(sagemaker: Any, request: dict[str, Any], poll_seconds: float) -> bool:
    """False when somebody else was quicker, or this request's first answer got lost.

    IAM makes a new role known everywhere within seconds, not at once: until then HyperPod cannot assume it.
    """
    for attempt in range(_ROLE_ATTEMPTS):
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
        time.sleep(poll_seconds)
    return True


def _bring_up_to_date(
    config: ClusterConfig, request: dict[str, Any], described: dict[str, Any], sagemaker: Any, say: Say
) -> dict[str, int]:
    name, status = config.name, described["ClusterStatus"]
    found = changes(config, request, described)
    say(f"cluster {name}: is there already, {status}")
    for line in found.other:
        say(f"cluster {name}: differs from the cluster file: {line}")
    if not found.groups:
        return {}
    if status != api.IN_SERVICE:
        say(f"cluster {name}: takes new groups and lifecycle scripts once it is InService: run this again then")
        return {}
    sagemaker.update_cluster(ClusterName=name, InstanceGroups=list(found.groups))
    if len(found.added) < len(found.groups):
        say(f"cluster {name}: nodes to come run the new lifecycle scripts; for those there see docs/lifecycle.md")
    for group, count in found.added.items():
        say(f"cluster {name}: asked for {count} more, group {group}; they are billed by the hour from now on")
    return found.added


def lay_foundation(config: ClusterConfig, session: Session, say: Say, poll_seconds: float) -> Foundation:
    """Make the stack, or bring it up to date; or look up the resources that the cluster file names."""
    if config.existing is not None:
        return of_existing(config.existing, session)
    say(f"stack {config.stack_name}: its NAT gateway, file system and bucket cost money")
    return stack.deploy(
        session,
        StackParameters.of(config),
        lambda event: say(f"stack {config.stack_name}: {event}") if event.worth_telling else None,
        poll_seconds=poll_seconds,
    )


def upload(config: ClusterConfig, bucket: str, content: dict[str, bytes], s3: Any, say: Say) -> str:
    """Put the lifecycle files into their folder of the bucket; returns the folder. The entry comes last."""
    folder = lifecycle_files.folder(config, content)
    for name in sorted(content, key=lambda name: name == requests.ENTRY):
        s3.put_object(Bucket=bucket, Key=f"{folder}/{name}", Body=content[name])
    say(f"lifecycle: {len(content)} files in s3://{bucket}/{folder}")
    return folder


def _instances(config: ClusterConfig) -> str:
    return ", ".join(f"{group.count} {group.instance_type}" for group in config.groups)
