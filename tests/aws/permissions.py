"""IAM's policy simulator, which moto lacks.

A role's policies are evaluated: Allow and Deny by actions, resources and conditions on equality; NotAction, NotResource
and boundaries are not. The scenario denies more: `ec2:CreateTags?aws:RequestTag/a` there stands for a policy that
allows the action only with that tag.
"""

import fnmatch
import functools
import json
from typing import Any

from moto.iam.exceptions import NotFoundException
from moto.iam.models import iam_backends

from tests.aws.wire import AwsError, operation
from tests.aws.world import ACCOUNT, Region

_VARIABLES = {"${aws:PrincipalAccount}": ACCOUNT}


@operation("iam", "SimulatePrincipalPolicy")
def simulate_principal_policy(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    kind, _, name = request["PolicySourceArn"].split(":", 5)[5].partition("/")
    name = name.rpartition("/")[2]
    if kind != "role":
        raise AwsError("InvalidInput", f"Invalid Entity Arn: {request['PolicySourceArn']}")
    try:
        statements = role_statements(name)
    except NotFoundException:
        raise AwsError("NoSuchEntity", f"{request['PolicySourceArn']} cannot be found.", 404) from None
    denied = region.world.scenario.denied_actions.get(name, [])
    context = {entry["ContextKeyName"]: entry["ContextKeyValues"] for entry in request.get("ContextEntries", [])}
    results = []
    for action in request["ActionNames"]:
        rules = [rule.partition("?") for rule in denied if _matches(action, rule.partition("?")[0])]
        for resource in request.get("ResourceArns", ["*"]):
            allowed, missing = evaluate(statements, action, resource, context)
            results.append(
                {
                    "EvalActionName": action,
                    "EvalResourceName": resource,
                    "EvalDecision": "allowed" if allowed and not rules else "implicitDeny",
                    "MissingContextValues": missing + [key for _, _, key in rules if key],
                }
            )
    return {"EvaluationResults": results, "IsTruncated": False}


def role_statements(role: str) -> list[dict[str, Any]]:
    """Those of all policies of a role. Raises moto's NotFoundException."""
    found = iam_backends[ACCOUNT]["aws"].get_role(role)  # without HTTP: asked for each request of a role
    attached = (
        next(version.document for version in policy.versions if version.version_id == policy.default_version_id)
        for policy in found.managed_policies.values()
    )
    return [statement for document in (*found.policies.values(), *attached) for statement in _statements(document)]


@functools.lru_cache
def _statements(document: str) -> list[dict[str, Any]]:
    return _listed(json.loads(document)["Statement"])


def evaluate(
    statements: list[dict[str, Any]], action: str, resource: str, context: dict[str, list[str]]
) -> tuple[bool, list[str]]:
    """Whether the statements allow an action, and the context keys that they ask for and `context` lacks."""
    allowed, missing = False, []
    for statement in statements:
        if not any(_matches(action, pattern) for pattern in _listed(statement["Action"])):
            continue
        if not any(fnmatch.fnmatchcase(resource, pattern) for pattern in _listed(statement.get("Resource", "*"))):
            continue
        wanted = [(key, value) for test in statement.get("Condition", {}).values() for key, value in test.items()]
        missing += [key for key, _ in wanted if key not in context]
        if all(_holds(context.get(key, []), _listed(value)) for key, value in wanted):
            if statement["Effect"] == "Deny":
                return False, missing
            allowed = True
    return allowed, missing


def _holds(values: list[str], patterns: list[str]) -> bool:
    expected = [_VARIABLES.get(pattern, pattern) for pattern in patterns]
    return any(fnmatch.fnmatchcase(value, pattern) for value in values for pattern in expected)


def _matches(action: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(action.lower(), pattern.lower())


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
