"""ClusterConfig: a cluster file, and the cluster that a command names by one or by its name.

Refuses what is wrong in any account; validation/ checks the rest. docs/cluster.md lists the keys, from this module.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from hyperpod_ft.cluster.sections import (
    AccountingDatabase,
    Controller,
    Existing,
    InstanceGroup,
    KmsKeys,
    Login,
    Lustre,
    Name,
    User,
    Workers,
)
from hyperpod_ft.config import yaml_file
from hyperpod_ft.config.fields import Region, Section, matches, shortened
from hyperpod_ft.config.yaml_file import FileKind
from hyperpod_ft.errors import UserError
from hyperpod_ft.shipped import shipped


class ClusterConfig(Section):
    """One cluster."""

    name: Name = Field(description="Name of the cluster.")
    region: Region = Field(description="AWS region.")
    availability_zone_id: Annotated[
        str, matches(r"[a-z]{3,5}\d-az\d", "the id of an availability zone, such as usw2-az4, not its name")
    ] = Field(
        description="Id of the zone of all nodes and the file system. Names of zones (us-west-2a) differ between"
        " accounts."
    )
    provisioning: Literal["api", "legacy"] = Field(
        "api",
        description="`api`: HyperPod sets up Slurm. `legacy`: the lifecycle scripts do, on images older than 2026.",
    )
    controller: Controller = Field(default_factory=Controller)
    login: Login | None = None
    workers: Annotated[tuple[Workers, ...], Field(min_length=1, max_length=98)]
    fsx: Lustre = Field(default_factory=Lustre)
    kms_keys: KmsKeys = Field(default_factory=KmsKeys)
    users: tuple[User, ...] = ()
    node_recovery: Literal["Automatic", "None"] = Field(
        "Automatic", description="Whether HyperPod replaces faulty nodes."
    )
    continuous_provisioning: bool = Field(
        True,
        description="The cluster is in service once its controller is, and HyperPod keeps trying to launch missing"
        " workers. If false, one missing worker fails the whole cluster. Needs provisioning `api`.",
    )
    accounting: Literal["controller", "rds"] | None = Field(
        None,
        description="Database of Slurm's accounting. `controller`: a MariaDB on the controller, the default with"
        " provisioning `api`. `rds`: your `accounting_database`, which outlives the controller. It needs"
        " `continuous_provisioning`, and cannot be undone.",
    )
    accounting_database: AccountingDatabase | None = None
    tags: dict[str, str] = Field(default_factory=dict, description="Tags of every resource; at most 40.")
    existing: Existing | None = None

    @property
    def groups(self) -> tuple[InstanceGroup, ...]:
        """Every instance group, the controller first."""
        return (self.controller, *((self.login,) if self.login else ()), *self.workers)

    @property
    def stack_name(self) -> str:
        return stack_name(self.name)

    @field_validator("tags")
    @classmethod
    def _taggable(cls, value: dict[str, str]) -> dict[str, str]:
        if len(value) > 40:
            raise ValueError(
                f"has {len(value)} tags; set at most 40 (AWS allows 50, some of which the kit and AWS use)"
            )
        for key in value:
            if key.lower().startswith("aws:"):
                raise ValueError(f"{shortened(key)}: tags that start with aws: are reserved by AWS; rename it")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> "ClusterConfig":
        _unique("instance group names", [group.name for group in self.groups])
        _unique("user names", [user.name for user in self.users])
        _unique("uid", [str(user.uid) for user in self.users])
        _unique("gid", [str(user.group_id) for user in self.users])
        if self.provisioning == "api":
            _check_partitions(self.workers)
        if (self.accounting == "rds") != (self.accounting_database is not None):
            raise ValueError("accounting: rds and the section accounting_database go together; set both or neither")
        if self.accounting == "rds" and not (self.provisioning == "api" and self.continuous_provisioning):
            raise ValueError(
                "accounting: rds needs provisioning: api and continuous_provisioning: true; set these, or controller"
            )
        if self.accounting_database and self.accounting_database.secret_arn.split(":")[3] != self.region:
            raise ValueError(f"accounting_database.secret_arn: not in region {self.region}; name a secret there")
        continuous = self.provisioning == "api" and self.continuous_provisioning
        if not continuous and any(group.min_count for group in self.workers):
            raise ValueError("min_count needs continuous_provisioning: otherwise all instances must come; leave it out")
        if problem := self.kms_keys.problem(self.region, existing=self.existing is not None, continuous=continuous):
            raise ValueError(problem)
        return self


def stack_name(cluster: str) -> str:
    """Name of a cluster's CloudFormation stack."""
    return f"hyperpod-{cluster}"


def _unique(what: str, values: list[str]) -> None:
    if twice := sorted({value for value in values if values.count(value) > 1}):
        raise ValueError(f"{what} used twice: {shortened(', '.join(twice))}; give each its own")


def _check_partitions(workers: tuple[Workers, ...]) -> None:
    """A job asks for a partition, not for a type: a partition has one type of nodes."""
    types: dict[str, str] = {}
    for index, group in enumerate(workers):
        name = group.slurm_partition
        if name == "dev":
            raise ValueError(
                f"workers.{index}.partition: HyperPod puts all nodes into dev, those for login included; leave it out,"
                " or choose another name"
            )
        if (known := types.setdefault(name, group.instance_type)) != group.instance_type:
            raise ValueError(
                f"workers.{index}.partition: {name} already has nodes of type {known}, and {group.name} has"
                f" {group.instance_type}; choose another name"
            )


CLUSTER_FILE = FileKind(ClusterConfig, "docs/cluster.md#the-cluster-file", "hyperpod-ft cluster init")


def example() -> Path:
    """A commented cluster file to start from."""
    return shipped("templates") / "cluster" / "cluster.yaml"


def load(path: Path, overrides: Sequence[str] = ()) -> ClusterConfig:
    """Read, override (`a.b=value`) and validate a cluster file. Raises UserError or ConfigError."""
    values: dict[str, Any] = yaml_file.parse(CLUSTER_FILE, path)
    for text in overrides:
        yaml_file.override(CLUSTER_FILE, values, text)
    return yaml_file.validate(CLUSTER_FILE, values, str(path))


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
        config = load(path)
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
