"""`cluster validate`: the checks before money is spent, offline first, then in the account."""

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from hyperpod_ft.aws.checks import network, role, storage
from hyperpod_ft.aws.checks.account import Check, ValidationResult, run_checks
from hyperpod_ft.aws.checks.capacity import training_plans
from hyperpod_ft.aws.session import explained
from hyperpod_ft.cluster.config import ClusterConfig
from hyperpod_ft.cluster.validation import (
    accounting_checks,
    network_checks,
    offline_checks,
    permission_checks,
    quota_checks,
    state_checks,
)
from hyperpod_ft.cluster.validation.check_input import BUCKET, FSX, GROUPS, KEYS, ROLE, SUBNET, CheckInput, place_of
from hyperpod_ft.findings import Finding

_SERVICES = ("sts", "ec2", "iam", "sagemaker", "service-quotas", "cloudformation", "fsx", "s3", "kms")
_OFFLINE: tuple[tuple[str, Callable[[ClusterConfig], Iterable[Finding]]], ...] = (
    ("request of CreateCluster", offline_checks.create_request),
    ("request of the stack", offline_checks.stack_request),
    ("region", offline_checks.region),
    ("availability zone", offline_checks.zone),
    ("bucket name", offline_checks.bucket),
    ("IP addresses", offline_checks.address_space),
    ("deep health checks", offline_checks.deep_health_checks),
    ("training plans' region", offline_checks.training_plans),
    ("lifecycle scripts", offline_checks.lifecycle),
)


def account_checks(config: ClusterConfig) -> list[Check[CheckInput]]:
    """The checks that apply to this cluster file."""
    checks: list[Check[CheckInput]] = [
        Check("name", "name", state_checks.name, ("name",)),
        Check("lifecycle scripts in S3", "name", permission_checks.scripts, ("name",)),
        Check("quotas", "workers", quota_checks.of_instances, ("*.instance_type",)),
        Check("quotas of the network", "workers", quota_checks.of_network, ("*.instance_type",)),
        Check(
            "zone offers the instance types",
            "availability_zone_id",
            quota_checks.zone,
            ("availability_zone_id", "*.instance_type"),
        ),
        Check("threads per core", "workers", quota_checks.threads, ("*.instance_type",)),
    ]
    if any(group.training_plan_arn for group in config.workers):
        checks.append(
            Check(
                "training plans",
                "workers",
                partial(training_plans, target="hyperpod-cluster"),
                ("*.training_plan_arn", "workers"),
            )
        )
    if config.kms_keys.given:
        checks.append(Check("KMS keys", KEYS, state_checks.keys))
    if config.accounting_database:
        checks.append(
            Check(
                "accounting database", accounting_checks.DATABASE, accounting_checks.database, ("accounting_database*",)
            )
        )
    if config.existing is None:
        return [*checks, Check("stack", "name", state_checks.stack, ("name",))]
    return [
        *checks,
        Check("subnet", SUBNET, network.subnet, (SUBNET, "*.instance_type")),
        Check("routes of the subnet", SUBNET, network_checks.routes, (SUBNET,)),
        Check("names of the VPC", SUBNET, network_checks.names, (SUBNET,)),
        Check("security groups", GROUPS, network.security_groups, (GROUPS,)),
        Check("FSx", FSX, storage.file_system, (FSX,)),
        Check("bucket", BUCKET, storage.bucket, (BUCKET,)),
        Check("role", ROLE, role.is_assumable, (ROLE,)),
        Check("permissions of the role", ROLE, permission_checks.role_permissions, (ROLE, BUCKET)),
        Check("read-only scripts", ROLE, permission_checks.role_only_reads, (ROLE, BUCKET)),
    ]


def validate(config: ClusterConfig, client: Callable[[str], object] | None) -> ValidationResult:
    """Run every check; changes nothing. `client` as for `validate_account`; None: only offline checks."""
    offline = validate_offline(config)
    return offline if client is None else offline + validate_account(config, client, offline.findings)


def validate_offline(config: ClusterConfig) -> ValidationResult:
    """Every check that needs no account, no credentials and no network. Raises UserError if botocore is missing."""
    began = time.monotonic()
    with explained(f"validation of {config.name}"):
        findings = tuple(finding for _, check in _OFFLINE for finding in check(config))
    return ValidationResult(findings, tuple(name for name, _ in _OFFLINE), (), time.monotonic() - began)


def validate_account(
    config: ClusterConfig, client: Callable[[str], object], offline: Iterable[Finding] = ()
) -> ValidationResult:
    """Every check of the account; changes nothing.

    `client` returns boto3's client for a service, in the cluster's region; `offline`: the findings of
    `validate_offline`. Raises UserError if no client can be made: no boto3, an unknown profile.
    """
    wrong = {finding.name for finding in offline if finding.verdict == "error"}
    checks = account_checks(config)
    if "region" in wrong:
        return ValidationResult(skipped=tuple(f"{check.name}: region is invalid" for check in checks))
    services = (*_SERVICES, *(accounting_checks.SERVICES if config.accounting_database else ()))

    def given(clients: Mapping[str, Any], account_id: str, partition: str) -> CheckInput:
        return CheckInput(place_of(config), clients, account_id, partition, config)

    return run_checks(config.name, checks, client, services, given, wrong)
