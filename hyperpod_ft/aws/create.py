"""From a cluster file to a cluster. Each step looks at what is there first, so that a run goes on from any other."""

import time
from collections.abc import Callable
from typing import Any

from hyperpod_ft.aws import hyperpod, lifecycle_files, requests, stack
from hyperpod_ft.aws.cluster_file import ClusterConfig
from hyperpod_ft.aws.foundation import Foundation, of_existing
from hyperpod_ft.aws.hyperpod import Cluster
from hyperpod_ft.aws.session import Session, error_code, error_message, explained
from hyperpod_ft.aws.stack import POLL_SECONDS, StackParameters
from hyperpod_ft.errors import UserError

Say = Callable[[str], None]
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
        _find(sagemaker, config.name, stack.subnet_id(config, session.client("cloudformation")))
        base = lay_foundation(config, session, say, poll_seconds)
        content = lifecycle_files.files(config, base)
        uri = f"s3://{base.bucket}/{upload(config, base.bucket, content, session.client('s3'), say)}"
        cluster = _find(sagemaker, config.name, base.subnet_id)
        if cluster is None and _create_cluster(sagemaker, requests.create_cluster(config, base, uri), poll_seconds):
            say(f"cluster {config.name}: asked for {_instances(config)}; they are billed by the hour from now on")
            return {group.name: group.count for group in config.groups}
        cluster = cluster or _find(sagemaker, config.name, base.subnet_id)
        assert cluster is not None, "HyperPod has just said that it exists"
        say(f"cluster {config.name}: is there already, {cluster.status}")
        for difference in differences(config, cluster):
            say(f"cluster {config.name}: {difference}")
        if cluster.status == hyperpod.IN_SERVICE:
            request = requests.create_cluster(config, base, uri)
            return _bring_up_to_date(config, cluster, request, uri, sagemaker, say)
        return {}


def _find(sagemaker: Any, name: str, subnet_id: str) -> Cluster | None:
    cluster = hyperpod.find(sagemaker, name)
    if cluster is not None and (problem := hyperpod.not_ours(cluster, subnet_id)):
        raise UserError(problem, "choose another name in the cluster file")
    return cluster


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
    config: ClusterConfig, cluster: Cluster, request: dict[str, Any], uri: str, sagemaker: Any, say: Say
) -> dict[str, int]:
    groups = (
        []
        if all(group.lifecycle_uri == uri for group in cluster.groups)
        else hyperpod.pointed_to(sagemaker, cluster, uri)
    )
    if groups:
        say(f"cluster {config.name}: nodes to come run {uri}; for those there see docs/lifecycle.md")
    there = {group.name for group in cluster.groups}
    added: dict[str, int] = {}
    for group in request["InstanceGroups"]:
        if group["InstanceGroupName"] not in there:
            groups.append(group)
            added[group["InstanceGroupName"]] = group["InstanceCount"]
    if groups:
        sagemaker.update_cluster(ClusterName=config.name, InstanceGroups=groups)
    for name, count in added.items():
        say(f"cluster {config.name}: asked for {count} more, group {name}")
    return added


def lay_foundation(config: ClusterConfig, session: Session, say: Say, poll_seconds: float) -> Foundation:
    """Make the stack, or bring it up to date; or look up the resources that the cluster file names."""
    if config.existing is not None:
        return of_existing(config.existing, session)
    say(f"stack {config.stack_name}: its NAT gateway, file system and bucket cost money from now on")
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


def differences(config: ClusterConfig, cluster: Cluster) -> list[str]:
    """What the cluster file says of instance groups that are there, and they are not; none of it is changed."""
    there = {group.name: group for group in cluster.groups}
    found = []
    for wanted in config.groups:
        group = there.pop(wanted.name, None)
        if group is None:
            continue  # will be added
        if group.instance_type != wanted.instance_type:
            found.append(f"{wanted.name} is made of {group.instance_type}, not of {wanted.instance_type}")
        elif group.target != wanted.count:
            command = f"hyperpod-ft cluster scale {config.name} {wanted.name} {wanted.count}"
            found.append(f"{wanted.name} is to have {group.target} instances, not {wanted.count}: {command}")
    return [*found, *(f"instance group {name} is not in the cluster file" for name in there)]


def _instances(config: ClusterConfig) -> str:
    return ", ".join(f"{group.count} {group.instance_type}" for group in config.groups)
