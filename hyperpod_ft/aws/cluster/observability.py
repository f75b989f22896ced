"""HyperPod's observability extension of a cluster. Functions raise UserError; a `timeout` is in minutes."""

import json

from hyperpod_ft.aws.cluster.access import ClusterAccess
from hyperpod_ft.aws.hyperpod import extension
from hyperpod_ft.aws.hyperpod.extension import Extension
from hyperpod_ft.aws.wait_for_change import Seen
from hyperpod_ft.errors import UserError

_MAX_SETTINGS = 10_240  # characters, from botocore's model


def installed(access: ClusterAccess) -> Extension | None:
    with access.explained():
        return extension.find(access.sagemaker, access.cluster().arn)


def install(access: ClusterAccess, settings: str | None, timeout: float | None) -> None:
    """Install it or change its settings, a JSON object; with a timeout, wait until all nodes run it."""
    if settings is not None:
        _check(settings)
    with access.explained():
        cluster = access.cluster()
        arn = cluster.arn
        if cluster.kubernetes or not cluster.continuous:
            raise UserError(
                f"cluster {access.name}: HyperPod has extensions only for Slurm clusters with continuous provisioning",
                "create a cluster with provisioning: api and continuous_provisioning: true",
            )
        before = extension.find(access.sagemaker, arn)
        extension.install(access.sagemaker, arn, before, settings)
    access.report(f"{extension.NAME}: requested")
    if timeout is not None:
        found = _settled(access, arn, before, timeout)
        if found is None or found.status != extension.ACTIVE:
            raise _failed(found, "fix the cause, then run the command again, which tries again on those nodes")


def remove(access: ClusterAccess, timeout: float | None) -> None:
    """Remove it; with a timeout, wait until no node runs it."""
    with access.explained():
        arn = access.cluster().arn
        before = extension.find(access.sagemaker, arn)
        if before is None:
            access.report(f"{extension.NAME}: not installed")
            return
        extension.remove(access.sagemaker, arn, before)
    access.report(f"{extension.NAME}: removal requested")
    if timeout is not None and (found := _settled(access, arn, before, timeout)):
        raise _failed(found, "fix the cause, then run the command again")


def _settled(access: ClusterAccess, arn: str, before: Extension | None, timeout: float) -> Extension | None:
    """The extension once HyperPod has stopped changing it; None if it is gone. `before`: what it was."""

    def look() -> Seen[Extension | None]:
        found = extension.find(access.sagemaker, arn)
        state = f"{found.status}, {found.active} of {found.total} nodes" if found else _status(None)
        begun = _status(found) != _status(before)
        return Seen(found, {extension.NAME: state}, begun, changing=found is not None and found.changing)

    return access.wait_for_change(look, timeout, "observability")[0]


def _failed(found: Extension | None, remedy: str) -> UserError:
    reasons = "; ".join(found.issues if found else ())
    return UserError(f"{extension.NAME}: {_status(found)}: {reasons or 'no reason given'}", remedy)


def _status(found: Extension | None) -> str:
    return found.status if found else "not installed"


def _check(settings: str) -> None:
    try:
        value = json.loads(settings)
    except ValueError as error:
        raise UserError(f"--settings: not JSON: {error}", "pass a JSON object") from None
    if not isinstance(value, dict) or len(settings) > _MAX_SETTINGS:
        raise UserError(
            f"--settings: not a JSON object of at most {_MAX_SETTINGS:,} characters", "pass a shorter JSON object"
        )
