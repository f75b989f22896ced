"""What an endpoint needs in the account: a quota for its instances, and its role. Read before anything is uploaded."""

from collections.abc import Callable
from functools import partial

from hyperpod_ft.aws.session import Session, explained
from hyperpod_ft.aws.validation import permission_checks, quota_checks
from hyperpod_ft.errors import UserError
from hyperpod_ft.findings import Finding, error, warning
from hyperpod_ft.serving.endpoint.create.endpoint_request import Target

_TYPE, _ROLE = "deploy.instance_type", "deploy.role"


def findings(target: Target, session: Session) -> list[Finding]:
    """What AWS would refuse, as errors; what could not be looked at, as warnings. Other endpoints use quotas too."""
    return [
        *_looked_at(_TYPE, "its quota", partial(_quota, target, session)),
        *_looked_at(_ROLE, "the role", partial(_role, target, session)),
    ]


def _quota(target: Target, session: Session) -> list[Finding]:
    limits = quota_checks.limits_of(session.client("service-quotas"), "sagemaker")
    name, needed = f"ml.{target.settings.instance_type} for endpoint usage", target.settings.instances
    if name not in limits:
        return [warning(_TYPE, *quota_checks.not_listed(name))]
    if needed <= limits[name]["Value"]:
        return []
    return [error(_TYPE, *quota_checks.quota_shortfall(target.region, limits[name], needed, 0))]


def _role(target: Target, session: Session) -> list[Finding]:
    account_id = session.client("sts").get_caller_identity()["Account"]
    return permission_checks.assumable(session.client("iam"), target.role, account_id, _ROLE)


def _looked_at(key: str, what: str, look: Callable[[], list[Finding]]) -> list[Finding]:
    try:
        with explained(f"could not check {what}"):
            return look()
    except UserError as problem:
        return [warning(key, problem.problem, problem.remedy)]
