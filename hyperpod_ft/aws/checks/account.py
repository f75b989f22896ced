"""An account, what is to run in it, and the checks that look whether it can.

A check that could not run (denied, throttled, no network) is a warning and never passes silently. One that is pointless
after an error in a key is skipped, and listed as skipped.

Instances take IP addresses in their subnet: a node of a Slurm cluster one for each network card, 32 for a P5
("Prerequisites for using SageMaker HyperPod" in the SageMaker developer guide, which gives 81 for EKS).
"""

import fnmatch
import ipaddress
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from hyperpod_ft.aws.session import explain, explained, paged
from hyperpod_ft.config.instances import CATALOGUE
from hyperpod_ft.errors import UserError
from hyperpod_ft.findings import Finding, error, warning

RESERVED_BY_AWS = 5  # of every subnet: the first four addresses and the last ("Subnet CIDR blocks", VPC user guide)
_PARALLEL = 8


@dataclass(frozen=True)
class Instances:
    """Instances of one type, and the keys by which the user asked for them."""

    instance_type: str  # with `ml.`
    count: int
    type_key: str
    count_key: str
    training_plan: str = ""  # ARN
    plan_key: str = ""


def ec2_type(instance_type: str) -> str:
    """`ml.trn1.32xlarge` -> `trn1.32xlarge`."""
    return instance_type.removeprefix("ml.")


def network_cards(instance_type: str) -> int:
    """EFA sits on each network card of an instance type; 1 for types that the kit's catalogue lacks."""
    instance = CATALOGUE.get(ec2_type(instance_type))
    return max(1, instance.efa) if instance else 1


def wanted(all_instances: Iterable[Instances], cards: Mapping[str, int] | None = None) -> int:
    """Addresses of all instances. `cards`: network cards by instance type (with `ml.`), as reported by EC2."""
    return sum(instances.count * _each(instances, cards) for instances in all_instances)


def usable(cidr: str) -> int:
    """The addresses of a subnet that AWS assigns."""
    return ipaddress.ip_network(cidr).num_addresses - RESERVED_BY_AWS


def breakdown(all_instances: Iterable[Instances], cards: Mapping[str, int] | None = None) -> str:
    """`2 x ml.trn1.32xlarge with 8 each`, for every type."""
    return ", ".join(f"{one.count} x {one.instance_type} with {_each(one, cards)} each" for one in all_instances)


def _each(instances: Instances, cards: Mapping[str, int] | None) -> int:
    return (cards or {}).get(instances.instance_type, network_cards(instances.instance_type))


class Named(NamedTuple):
    """An existing resource, and the key under which the user named it."""

    key: str = ""
    id: str = ""


_NONE = Named()


@dataclass(frozen=True)
class Place:
    """Where something is to run: the instances, and the existing resources that they use."""

    what: str  # `cluster`, in messages
    region: str
    instances: tuple[Instances, ...]
    zone: str = ""  # id of the instances' availability zone; empty where the subnets decide
    zone_key: str = ""
    role: Named = _NONE
    bucket: Named = _NONE
    subnet: Named = _NONE
    security_groups: tuple[str, tuple[str, ...]] = ("", ())  # the key, and their ids
    file_system: Named = _NONE


@dataclass(frozen=True)
class Account:
    """What checks look at. `clients` are boto3's, by service; several threads may use them."""

    place: Place
    clients: Mapping[str, Any]
    account_id: str  # twelve digits
    partition: str  # `aws`, or that of ARNs in other parts of the world

    def has_instances(self) -> bool:
        """Whether the instances run already, so that what they take is no longer free."""
        return False

    def instance_types(self) -> dict[str, dict[str, Any]]:
        """EC2's descriptions of the instance types, by SageMaker's name, if offered in this region."""
        names = sorted({instances.instance_type for instances in self.place.instances})
        wanted = [{"Name": "instance-type", "Values": [ec2_type(name) for name in names]}]
        found = paged(self.clients["ec2"], "describe_instance_types", "InstanceTypes", Filters=wanted)
        return {f"ml.{one['InstanceType']}": one for one in found}

    def subnet(self) -> dict[str, Any] | None:
        """The subnet; None if it does not exist."""
        found = self.clients["ec2"].describe_subnets(Filters=[{"Name": "subnet-id", "Values": [self.place.subnet.id]}])[
            "Subnets"
        ]
        return found[0] if found else None

    def security_groups(self, ids: Sequence[str]) -> list[dict[str, Any]]:
        """The security groups among `ids` that exist."""
        wanted = [{"Name": "group-id", "Values": list(ids)}]
        return list(paged(self.clients["ec2"], "describe_security_groups", "SecurityGroups", Filters=wanted))


Checked = TypeVar("Checked", bound=Account)


@dataclass(frozen=True)
class Check(Generic[Checked]):
    """`field`: the key of the warning if the check could not run. An error in a key that matches one of
    `pointless_after` skips it."""

    name: str
    field: str
    run: Callable[[Checked], Iterable[Finding]]
    pointless_after: tuple[str, ...] = ()


@dataclass(frozen=True)
class ValidationResult:
    """The findings, and the checks that were made."""

    findings: tuple[Finding, ...] = ()
    done: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()  # `NAME: the reason`
    seconds: float = 0.0
    account: str = ""  # its number; empty if offline

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
        )


def run_checks(
    name: str,
    checks: Sequence[Check[Checked]],
    client: Callable[[str], object],
    services: Iterable[str],
    account: Callable[[Mapping[str, Any], str, str], Checked],
    wrong: Iterable[str] = (),
) -> ValidationResult:
    """The findings of these checks, except those that are pointless after errors in the keys `wrong`.

    `client` returns boto3's client for one of the `services`, in the region; `account` is given all clients, the
    account's number and the partition. Raises UserError if no client can be made: no boto3, an unknown profile.
    """
    began = time.monotonic()
    # boto3 can create clients in one thread only; several threads may then use them
    with explained(f"validation of {name}"):
        clients = {service: client(service) for service in services}
    identity, refusal = _identify(clients)
    if identity is None:
        skipped = tuple(f"{check.name}: the credentials do not work" for check in checks)
        return ValidationResult(refusal, (), skipped, time.monotonic() - began)
    given = account(clients, *identity)
    blocked = {check.name: key for check in checks if (key := _blocking_key(check, wrong))}
    sensible = [check for check in checks if check.name not in blocked]
    with ThreadPoolExecutor(_PARALLEL) as pool:
        answers = list(pool.map(lambda check: _run(check, given), sensible))
    done = tuple(check.name for check, (_, made) in zip(sensible, answers, strict=True) if made)
    findings = tuple(dict.fromkeys(finding for found, _ in answers for finding in found))
    skipped = tuple(f"{check}: {key} is invalid" for check, key in blocked.items())
    return ValidationResult(findings, done, skipped, time.monotonic() - began, given.account_id)


def looked_at(key: str, what: str, look: Callable[[], list[Finding]]) -> list[Finding]:
    """What `look` finds, outside of `run_checks`; a warning under `key` where AWS does not let it look."""
    try:
        with explained(f"could not check {what}"):
            return look()
    except UserError as problem:
        return [warning(key, problem.problem, problem.remedy)]


def why_not_checked(error: Exception, clients: Mapping[str, Any]) -> tuple[str, str]:
    """Why a check could not run, and what to do about it, for any error of botocore."""
    problem, remedy = explain(error, {})
    operation = getattr(error, "operation_name", "")
    models = [client.meta.service_model for client in clients.values()]
    service = next((model.signing_name for model in models if operation in model.operation_names), "")
    if remedy.endswith(f" {operation}") and service:  # AWS's message does not name the service
        remedy = remedy.replace(operation, f"{service}:{operation}")
    return problem, remedy or "run validate again later"


def _identify(clients: dict[str, Any]) -> tuple[tuple[str, str] | None, tuple[Finding, ...]]:
    """The account's number and the partition, or why they cannot be had."""
    from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415 - only in the account

    try:
        identity = clients["sts"].get_caller_identity()
    except (BotoCoreError, ClientError) as problem:
        what, _ = why_not_checked(problem, clients)
        return None, (error("credentials", what, "log in, so that `aws sts get-caller-identity` works"),)
    return (identity["Account"], identity["Arn"].split(":")[1]), ()


def _run(check: Check[Checked], given: Checked) -> tuple[list[Finding], bool]:
    from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415 - only in the account

    try:
        return list(check.run(given)), True
    except (BotoCoreError, ClientError) as problem:
        what, remedy = why_not_checked(problem, given.clients)
        return [warning(check.field, f"could not check {check.name}: {what}", remedy)], False


def _blocking_key(check: Check[Checked], wrong: Iterable[str]) -> str:
    """The invalid key that makes a check pointless; empty if none."""
    return next(
        (key for key in sorted(wrong) for pattern in check.pointless_after if fnmatch.fnmatchcase(key, pattern)), ""
    )
