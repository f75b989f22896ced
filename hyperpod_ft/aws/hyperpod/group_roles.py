"""What the instance groups of a cluster are for (pure)."""

from dataclasses import dataclass

from hyperpod_ft.aws.hyperpod.api import HyperPodCluster
from hyperpod_ft.config.cluster_config import ClusterConfig

# of AWS's scripts and this kit's example
_USUAL_NAMES = {"controller-machine": "Controller", "login-group": "Login"}


@dataclass(frozen=True)
class GroupRoles:
    """Names of instance groups; None where the cluster has no such group, or none can be recognized."""

    controller: str | None
    login: str | None
    workers: tuple[str, ...]

    @classmethod
    def of(cls, cluster: HyperPodCluster, config: ClusterConfig | None) -> "GroupRoles":
        """HyperPod reports roles only for clusters whose Slurm it set up; for others names decide: those of the
        cluster file, or the usual ones."""
        named = _USUAL_NAMES if config is None else _names_in(config)
        roles = [(group.node_type or named.get(group.name, "Compute"), group.name) for group in cluster.groups]
        controllers, logins, workers = (
            tuple(name for role, name in roles if role == wanted) for wanted in ("Controller", "Login", "Compute")
        )
        return cls(next(iter(controllers), None), next(iter(logins), None), workers)

    @property
    def entry(self) -> str | None:
        """The group that users log in to: the login group, or the controller if there is none."""
        return self.login or self.controller


def _names_in(config: ClusterConfig) -> dict[str, str]:
    return {config.controller.name: "Controller"} | ({config.login.name: "Login"} if config.login else {})
