"""The role that instances are to have: SageMaker may assume it, and it has permissions, by IAM's policy simulator."""

import fnmatch
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from hyperpod_ft.aws.checks.account import Account
from hyperpod_ft.aws.session import answer_or_none
from hyperpod_ft.findings import Finding, error, warning

_SERVICE = "sagemaker.amazonaws.com"


@dataclass(frozen=True)
class Need:
    """Actions on one resource. `context`: the request's context keys, for conditions of policies."""

    actions: tuple[str, ...]
    resource: str = "*"
    context: dict[str, str] = field(default_factory=dict)


def is_assumable(given: Account) -> list[Finding]:
    """The role exists, is in this account, and SageMaker may assume it."""
    return assumable(given.clients["iam"], given.place.role.id, given.account_id, given.place.role.key)


def assumable(iam: Any, arn: str, account_id: str, key: str) -> list[Finding]:
    """The role that `key` names exists, is in this account, and SageMaker may assume it."""
    if (of := arn.split(":")[4]) != account_id:
        return [
            error(key, f"{arn} is in account {of}, your credentials in {account_id}", "name a role of your account")
        ]
    answer = answer_or_none(iam.get_role, "NoSuchEntity", RoleName=_name(arn))
    if answer is None:
        return [error(key, f"no role {_name(arn)} in account {account_id}", "correct the ARN")]
    found = answer["Role"]
    if found["Arn"] != arn:
        return [error(key, f"the role {_name(arn)} is {found['Arn']}, not {arn}", "correct the ARN")]
    if any(_trusts_sagemaker(statement) for statement in _statements(found["AssumeRolePolicyDocument"])):
        return []
    return [
        error(
            key,
            f"{_name(arn)} does not trust {_SERVICE}",
            f"allow it: aws iam update-assume-role-policy --role-name {_name(arn)}, with Principal Service {_SERVICE}"
            " and Action sts:AssumeRole",
        )
    ]


def has_permissions(given: Account, needs: list[Need], remedy: str) -> list[Finding]:
    """The role has these permissions."""
    (key, arn), iam = given.place.role, given.clients["iam"]
    try:
        return _findings(key, _name(arn), denied(iam, arn, needs), remedy)
    except iam.exceptions.NoSuchEntityException:
        return []  # reported by `role`


def _findings(key: str, who: str, denied: Iterable[tuple[str, list[str]]], remedy: str) -> list[Finding]:
    """An error for denied actions, a warning for those that depend on context keys unknown to the simulation."""
    lacking: list[str] = []
    depends: list[str] = []
    for action, unknown in denied:
        found, text = (depends, f"{action} ({', '.join(unknown)})") if unknown else (lacking, action)
        if text not in found:
            found.append(text)
    findings = [error(key, f"{who} may not {', '.join(lacking)}", remedy)] if lacking else []
    if depends:
        problem = f"could not check {who} for {', '.join(depends)}: that depends on the context keys in brackets"
        findings.append(warning(key, problem, "check the conditions of its policies"))
    return findings


def denied(iam: Any, arn: str, needs: Iterable[Need]) -> Iterator[tuple[str, list[str]]]:
    """The actions that IAM's simulator denies, with the context keys that policies require beyond `Need.context`.

    Raises ClientError.
    """
    for need in needs:
        pages = iam.get_paginator("simulate_principal_policy").paginate(
            PolicySourceArn=arn,
            ActionNames=list(need.actions),
            ResourceArns=[need.resource],
            ContextEntries=[
                {"ContextKeyName": key, "ContextKeyValues": [value], "ContextKeyType": "string"}
                for key, value in need.context.items()
            ],
        )
        for page in pages:
            for result in page["EvaluationResults"]:
                if result["EvalDecision"] != "allowed":
                    yield result["EvalActionName"], result.get("MissingContextValues", [])


def _trusts_sagemaker(statement: dict[str, Any]) -> bool:
    principal = statement.get("Principal", {})
    services = _listed(principal.get("Service", [])) if isinstance(principal, dict) else []
    return (
        statement.get("Effect") == "Allow"
        and any(_matches("sts:AssumeRole", action) for action in _listed(statement.get("Action", [])))
        and _SERVICE in services
    )


def _statements(document: dict[str, Any]) -> list[dict[str, Any]]:
    return _listed(document.get("Statement", []))


def _matches(action: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(action.lower(), pattern.lower())


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _name(arn: str) -> str:
    return arn.rpartition("/")[2]
