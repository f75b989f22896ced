"""The operations of `hyperpod-ft cluster observability`."""

import json
from dataclasses import dataclass

from hyperpod_ft.aws.cluster.access import ClusterAccess
from hyperpod_ft.aws.hyperpod import extension
from hyperpod_ft.aws.hyperpod.extension import Extension
from hyperpod_ft.aws.wait_for_change import Seen
from hyperpod_ft.errors import UserError

_MAX_SETTINGS = 10_240  # characters, from botocore's model


@dataclass(frozen=True)
class Observability:
    """HyperPod's observability extension of one cluster. Methods raise UserError; durations are in minutes."""

    access: ClusterAccess

    def installed(self) -> Extension | None:
        with self.access.explained():
            return extension.find(self.access.sagemaker, self.access.cluster().arn)

    def install(self, settings: str | None, timeout: float | None) -> None:
        """Install it or change its settings, a JSON object; with a timeout, wait until all nodes run it."""
        if settings is not None:
            _check(settings)
        with self.access.explained():
            cluster = self.access.cluster()
            arn = cluster.arn
            if cluster.kubernetes or not cluster.continuous:
                raise UserError(
                    f"cluster {self.access.name}: HyperPod has extensions only for Slurm clusters with continuous"
                    " provisioning",
                    "create a cluster with provisioning: api and continuous_provisioning: true",
                )
            before = extension.find(self.access.sagemaker, arn)
            extension.install(self.access.sagemaker, arn, before, settings)
        self.access.report(f"{extension.NAME}: requested")
        if timeout is not None:
            found = self._settled(arn, before, timeout)
            if found is None or found.status != extension.ACTIVE:
                raise _failed(found, "fix the cause, then run the command again, which tries again on those nodes")

    def remove(self, timeout: float | None) -> None:
        """Remove it; with a timeout, wait until no node runs it."""
        with self.access.explained():
            arn = self.access.cluster().arn
            before = extension.find(self.access.sagemaker, arn)
            if before is None:
                self.access.report(f"{extension.NAME}: not installed")
                return
            extension.remove(self.access.sagemaker, arn, before)
        self.access.report(f"{extension.NAME}: removal requested")
        if timeout is not None and (found := self._settled(arn, before, timeout)):
            raise _failed(found, "fix the cause, then run the command again")

    def _settled(self, arn: str, before: Extension | None, timeout: float) -> Extension | None:
        """The extension once HyperPod has stopped changing it; None if it is gone. `before`: what it was."""

        def look() -> Seen[Extension | None]:
            found = extension.find(self.access.sagemaker, arn)
            state = f"{found.status}, {found.active} of {found.total} nodes" if found else _status(None)
            begun = _status(found) != _status(before)
            return Seen(found, {extension.NAME: state}, begun, changing=found is not None and found.changing)

        return self.access.wait_for_change(look, timeout, "observability")[0]


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
