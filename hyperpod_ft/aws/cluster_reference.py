"""Which cluster a command is about: a cluster file's, or one by name."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from hyperpod_ft.config import cluster_config
from hyperpod_ft.config.cluster_config import ClusterConfig
from hyperpod_ft.errors import UserError


@dataclass(frozen=True)
class ClusterReference:
    """A cluster to look for. `region` is None where boto3's own configuration is to say."""

    name: str
    region: str | None
    config: ClusterConfig | None
    reference: str  # what the user gave

    @property
    def words(self) -> str:
        """How a command names this cluster, for a line that is to be run as it stands."""
        region = f" --region {self.region}" if self.config is None and self.region else ""
        return shlex.quote(self.reference) + region


def find(reference: str, region: str | None) -> ClusterReference:
    """The cluster of a cluster file, or the one with this name. Raises UserError or ConfigError."""
    path = Path(reference)
    if path.is_file():
        config = cluster_config.load(path)
        if region not in (None, config.region):
            raise UserError(f"--region {region}: {path} says {config.region}", "leave --region out, or give a name")
        return ClusterReference(config.name, config.region, config, reference)
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        raise UserError(f"{path}: no such cluster file", "`hyperpod-ft cluster init` writes one; or give a name")
    return ClusterReference(reference, region, None, reference)
