"""What the checks of a cluster file look at: the file, and the account that it is for."""

from dataclasses import dataclass, replace
from typing import Any

from hyperpod_ft.aws import stacks
from hyperpod_ft.aws.checks.account import Account, Instances, Named, Place
from hyperpod_ft.cluster.config import ClusterConfig
from hyperpod_ft.cluster.hyperpod import api
from hyperpod_ft.cluster.hyperpod.request_fields import keyed_groups
from hyperpod_ft.cluster.sections import Existing, Workers

ZONE = "availability_zone_id"
SUBNET, GROUPS, FSX = "existing.subnet_id", "existing.security_group_ids", "existing.fsx_id"
ROLE, BUCKET, KEYS = "existing.execution_role_arn", "existing.bucket", "kms_keys"


@dataclass(frozen=True)
class CheckInput(Account):
    """`place` is that of the cluster file."""

    config: ClusterConfig

    @property
    def existing(self) -> Existing:
        """The existing resources; only checks of such resources may ask for them."""
        assert self.config.existing is not None
        return self.config.existing

    def cluster(self) -> dict[str, Any] | None:
        """DescribeCluster's answer for the cluster's name; None if it does not exist."""
        return api.describe(self.clients["sagemaker"], self.config.name)

    def has_instances(self) -> bool:
        return self.cluster() is not None

    def stack(self) -> dict[str, Any] | None:
        """The cluster's stack, from DescribeStacks; None if it does not exist."""
        return stacks.describe(self.clients["cloudformation"], self.config.stack_name)


def instances_of(config: ClusterConfig) -> tuple[Instances, ...]:
    """All groups."""
    return tuple(
        Instances(
            group.instance_type,
            group.count,
            f"{key}.instance_type",
            f"{key}.count",
            (group.training_plan_arn or "") if isinstance(group, Workers) else "",
            f"{key}.training_plan_arn",
        )
        for key, group in keyed_groups(config)
    )


def place_of(config: ClusterConfig) -> Place:
    place = Place("cluster", config.region, instances_of(config), config.availability_zone_id, ZONE)
    if (existing := config.existing) is None:
        return place
    return replace(
        place,
        role=Named(ROLE, existing.execution_role_arn),
        bucket=Named(BUCKET, existing.bucket),
        subnet=Named(SUBNET, existing.subnet_id),
        security_groups=(GROUPS, existing.security_group_ids),
        file_system=Named(FSX, existing.fsx_id),
    )
