"""The cluster that a command names: by its cluster file, or by its name."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from hyperpod_ft.config import cluster_config
from hyperpod_ft.config.cluster_config import ClusterConfig
from hyperpod_ft.errors import UserError


@dataclass(frozen=True)
class ClusterReference:
    """A cluster to look for. `region` None means the region of boto3's configuration."""

    name: str
    region: str | None
    config: ClusterConfig | None
    reference: str  # as the user typed it

    @property
    def arguments(self) -> str:
        """The arguments that name this cluster, for commands in messages."""
        region = f" --region {self.region}" if self.config is None and self.region else ""
        return shlex.quote(self.reference) + region


def find(reference: str, region: str | None) -> ClusterReference:
    """The cluster of a cluster file, or the one with this name. Raises UserError or ConfigError."""
    path = Path(reference)
    if path.is_file():
        config = cluster_config.load(path)
        if region not in (None, config.region):
            raise UserError(
                f"--region {region}: {path} has region: {config.region}",
                "leave --region out, or pass the cluster's name",
            )
        return ClusterReference(config.name, config.region, config, reference)
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        raise UserError(
            f"{path}: no such cluster file", "write one with `hyperpod-ft cluster init`, or pass a cluster's name"
        )
    return ClusterReference(reference, region, None, reference)
