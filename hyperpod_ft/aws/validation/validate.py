"""`cluster validate`: the checks before money is spent, offline first, then in the account.

A check of the account that could not run (denied, throttled, no network) is a warning and never passes silently. One
that is pointless after an offline error is skipped, and listed as skipped.
"""

import fnmatch
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from hyperpod_ft.aws.session import explained
from hyperpod_ft.aws.validation import (
    accounting_checks,
    caller_permissions,
    capacity_checks,
    filesystem_checks,
    lifecycle_checks,
    network_checks,
    offline_checks,
    permission_checks,
    quota_checks,
    state_checks,
)
from hyperpod_ft.aws.validation.check_input import SERVICES, CheckInput, why_not_checked
from hyperpod_ft.config.cluster_config import ClusterConfig
from hyperpod_ft.findings import Finding, error, warning

_PARALLEL = 8
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


@dataclass(frozen=True)
class Check:
    """`field`: the key of the warning if the check could not run. An offline error in a key that matches one of
    `pointless_after` skips it."""

    name: str
    field: str
    run: Callable[[CheckInput], Iterable[Finding]]
    pointless_after: tuple[str, ...] = ()


@dataclass(frozen=True)
class ValidationResult:
    """The findings, and the checks that were made."""

    findings: tuple[Finding, ...] = ()
    done: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()  # `NAME: the reason`
    seconds: float = 0.0
    account: str = ""  # its number; empty if offline
    caller: str = ""  # ARN

    @property
    def has_errors(self) -> bool:
        return any(finding.verdict == "error" for finding in self.findings)

    def __add__(self, other: "ValidationResult") -> "ValidationResult":
        return ValidationResult(
            self.findings + other.findings,
            self.done + other.done,
            self.skipped + other.skipped,
            self.seconds + other.seconds,
            self.account or other.account,
            self.caller or other.caller,
        )


def account_checks(config: ClusterConfig) -> list[Check]:
    """The checks that apply to this cluster file."""
    checks = [
        Check("name", "name", state_checks.name, ("name",)),
        Check("lifecycle scripts in S3", "name", lifecycle_checks.scripts, ("name",)),
        Check("quotas", "workers", quota_checks.quotas, ("*.instance_type",)),
        Check("quotas of the network", "workers", quota_checks.network_quotas, ("*.instance_type",)),
        Check(
            "zone offers the instance types",
            "availability_zone_id",
            capacity_checks.zone,
            ("availability_zone_id", "*.instance_type"),
        ),
        Check("threads per core", "workers", capacity_checks.threads, ("*.instance_type",)),
        Check("permissions to create", "credentials", caller_permissions.caller_permissions),
    ]
    if any(group.training_plan_arn for group in config.workers):
        checks.append(
            Check("training plans", "workers", capacity_checks.training_plans, ("*.training_plan_arn", "workers"))
        )
    if config.kms_keys.given:
        checks.append(Check("KMS keys", state_checks.KEYS, state_checks.keys))
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
        Check("subnet", network_checks.SUBNET, network_checks.subnet, (network_checks.SUBNET, "*.instance_type")),
        Check("routes of the subnet", network_checks.SUBNET, network_checks.routes, (network_checks.SUBNET,)),
        Check("names of the VPC", network_checks.SUBNET, network_checks.names, (network_checks.SUBNET,)),
        Check("security groups", network_checks.GROUPS, network_checks.security_groups, (network_checks.GROUPS,)),
        Check("FSx", filesystem_checks.FSX, filesystem_checks.file_system, (filesystem_checks.FSX,)),
        Check("bucket", state_checks.BUCKET, state_checks.bucket, (state_checks.BUCKET,)),
        Check("role", permission_checks.ROLE, permission_checks.role_is_assumable, (permission_checks.ROLE,)),
        Check(
            "permissions of the role",
            permission_checks.ROLE,
            permission_checks.role_permissions,
            (permission_checks.ROLE, state_checks.BUCKET),
        ),
        Check(
            "read-only scripts",
            permission_checks.ROLE,
            lifecycle_checks.role_only_reads,
            (permission_checks.ROLE, state_checks.BUCKET),
        ),
    ]


def validate(config: ClusterConfig, client: Callable[[str], object]) -> ValidationResult:
    """Run every check; changes nothing. `client` as for `validate_account`."""
    offline = validate_offline(config)
    return offline + validate_account(config, client, offline.findings)


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
    services = (*SERVICES, *(accounting_checks.SERVICES if config.accounting_database else ()))
    return run_checks(config, checks, client, wrong, services)


def run_checks(
    config: ClusterConfig,
    checks: list[Check],
    client: Callable[[str], object],
    wrong: set[str],
    services: Iterable[str] = SERVICES,
) -> ValidationResult:
    """The findings of these checks, except those that are pointless after errors in the keys `wrong`.

    `client` as for `validate_account`; `services`: those that the checks use.
    """
    began = time.monotonic()
    # boto3 can create clients in one thread only; several threads may then use them
    with explained(f"validation of {config.name}"):
        clients = {service: client(service) for service in services}
    given, refusal = _identify(config, clients)
    if given is None:
        skipped = tuple(f"{check.name}: the credentials do not work" for check in checks)
        return ValidationResult(refusal, (), skipped, time.monotonic() - began)
    skipped = tuple(f"{check.name}: {field} is invalid" for check in checks if (field := _blocking_key(check, wrong)))
    sensible = [check for check in checks if not _blocking_key(check, wrong)]
    with ThreadPoolExecutor(_PARALLEL) as pool:
        answers = list(pool.map(lambda check: _run(check, given), sensible))
    done = tuple(check.name for check, (_, made) in zip(sensible, answers, strict=True) if made)
    findings = tuple(dict.fromkeys(finding for found, _ in answers for finding in found))
    return ValidationResult(findings, done, skipped, time.monotonic() - began, given.account_id, given.caller)


def _identify(config: ClusterConfig, clients: dict[str, object]) -> tuple[CheckInput | None, tuple[Finding, ...]]:
    from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415 - only in the account

    try:
        identity = clients["sts"].get_caller_identity()  # type: ignore[attr-defined]
    except (BotoCoreError, ClientError) as problem:
        what, _ = why_not_checked(problem, clients)
        return None, (error("credentials", what, "log in, so that `aws sts get-caller-identity` works"),)
    return CheckInput(config, clients, identity["Account"], identity["Arn"]), ()


def _run(check: Check, given: CheckInput) -> tuple[list[Finding], bool]:
    from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415 - only in the account

    try:
        return list(check.run(given)), True
    except (BotoCoreError, ClientError) as problem:
        what, remedy = why_not_checked(problem, given.clients)
        return [warning(check.field, f"could not check {check.name}: {what}", remedy)], False


def _blocking_key(check: Check, wrong: set[str]) -> str:
    """The invalid key that makes a check pointless; empty if none."""
    return next(
        (key for key in sorted(wrong) for pattern in check.pointless_after if fnmatch.fnmatchcase(key, pattern)), ""
    )
