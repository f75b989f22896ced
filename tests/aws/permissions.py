"""IAM's policy simulator, which moto lacks: everything is allowed but what the scenario denies."""

import fnmatch
from typing import Any

from tests.aws.wire import AwsError, operation
from tests.aws.world import Region


@operation("iam", "SimulatePrincipalPolicy")
def simulate_principal_policy(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    kind, _, name = request["PolicySourceArn"].split(":", 5)[5].rpartition("/")
    if not kind.startswith(("role", "user")):
        raise AwsError("InvalidInput", f"Invalid Entity Arn: {request['PolicySourceArn']}")
    denied = region.world.scenario.denied_actions.get(name, [])
    return {
        "EvaluationResults": [
            {
                "EvalActionName": action,
                "EvalResourceName": resource,
                "EvalDecision": "implicitDeny" if any(fnmatch.fnmatch(action, d) for d in denied) else "allowed",
            }
            for action in request["ActionNames"]
            for resource in request.get("ResourceArns", ["*"])
        ],
        "IsTruncated": False,
    }
