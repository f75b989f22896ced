"""Checks of what the account already has: a cluster or a stack of this name, the bucket, KMS keys."""

from collections.abc import Iterable, Iterator
from typing import Any

from hyperpod_ft.aws.session import answer_or_none
from hyperpod_ft.aws.stacks import parameters
from hyperpod_ft.cluster.config import ClusterConfig
from hyperpod_ft.cluster.hyperpod import api
from hyperpod_ft.cluster.stack.stack import kit_stack, subnet_id
from hyperpod_ft.cluster.validation.check_input import CheckInput
from hyperpod_ft.errors import UserError
from hyperpod_ft.findings import Finding, error, warning

FOR_A_NEW_CLUSTER = "for a new cluster choose another name"


def name(given: CheckInput) -> list[Finding]:
    """No cluster has the name, or only this cluster file's own, with which `cluster create` continues."""
    cluster = given.cluster()
    if cluster is None:
        return []
    subnet = subnet_id(given.config, given.clients["cloudformation"])
    if problem := api.not_ours(api.of_description(cluster), subnet):
        return [error("name", problem, "choose another name")]
    called, status = given.config.name, cluster["ClusterStatus"]
    if status in ("Failed", "RollingBack", "Deleting"):
        return [error("name", f"cluster {called} already exists, {status}", "delete it first, or choose another name")]
    problem = f"cluster {called} already exists, {status}: `cluster create` would continue with it"
    return [warning("name", problem, FOR_A_NEW_CLUSTER)]


def stack(given: CheckInput) -> Iterable[Finding]:
    """The cluster's stack, if there is one, can be deployed again."""
    try:
        # stdout may be JSON
        kit_stack(given.clients["cloudformation"], given.config.stack_name, lambda _: None).require_deployable()
    except UserError as refusal:
        return [error("name", refusal.problem, refusal.remedy)]
    return _fixed(given.config, given.stack() or {})


def _fixed(config: ClusterConfig, stack: dict[str, Any]) -> Iterator[Finding]:
    """Changes of the file system that are impossible: CloudFormation would replace it."""
    given = parameters(stack)
    zone, gib = given.get("AvailabilityZoneId", ""), int(given.get("FsxStorageGiB", 0))
    if zone and zone != config.availability_zone_id:
        problem = f"the stack {config.stack_name} is in {zone}, with a file system that cannot move"
        yield error("availability_zone_id", problem, f"set {zone}, or choose another name")
    if gib > config.fsx.size_gib:
        problem = f"the file system of {config.stack_name} has {gib} GiB and cannot shrink"
        yield error("fsx.size_gib", problem, f"set {gib}, or choose another name")
    if given and (now := given.get("FsxKey", "")) != (config.kms_keys.fsx or ""):
        problem = f"the file system of {config.stack_name} has {now or 'the key of AWS'}, which cannot be changed"
        remedy = f"set {now}" if now else "remove the key"
        yield error("kms_keys.fsx", problem, f"{remedy}, or choose another name")


def keys(given: CheckInput) -> Iterator[Finding]:
    """The keys exist, are enabled, and encrypt symmetrically, as EBS, FSx and S3 require."""
    kms = given.clients["kms"]
    for key, arn in given.config.kms_keys.given.items():
        answer = answer_or_none(kms.describe_key, "NotFoundException", KeyId=arn)
        if answer is None:
            yield error(key, f"no key {arn}", "correct the ARN: aws kms list-keys")
            continue
        kind, state = answer["KeyMetadata"]["KeySpec"], answer["KeyMetadata"]["KeyState"]
        if kind != "SYMMETRIC_DEFAULT":
            yield error(key, f"{arn} is a key of kind {kind}", "name a symmetric key")
        elif state != "Enabled":
            yield error(key, f"{arn} is {state}", f"enable it: aws kms enable-key --key-id {arn}")
