"""The extension's state: the scenario, the clock, and the resources of each region. moto keeps the rest."""

import functools
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import boto3
from botocore.config import Config

from tests.aws.clock import Clock, Process
from tests.aws.scenario import Scenario

if TYPE_CHECKING:
    from tests.aws.clusters import Cluster
    from tests.aws.endpoints import Hosted
    from tests.aws.filesystems import FileSystem
    from tests.aws.stacks import Stack
    from tests.aws.training_jobs import TrainingJob

ACCOUNT = "123456789012"  # moto's


@dataclass
class World:
    endpoint: str
    scenario: Scenario = field(default_factory=Scenario)
    clock: Clock = field(default_factory=Clock)
    requests: list[tuple[str, str]] = field(default_factory=list)
    regions: dict[str, "Region"] = field(default_factory=dict)
    bucket_policies: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # statements, by bucket

    def region(self, name: str) -> "Region":
        return self.regions.setdefault(name, Region(self, name))

    def close(self) -> None:
        """End the processes that are part of it, and who waits for its clock."""
        self.clock.started.set()
        for region in self.regions.values():
            for job in region.training_jobs.values():
                job.remove()
            for hosted in (*region.endpoints.values(), *region.components.values()):
                hosted.stop()


@dataclass
class Region:
    world: World
    name: str
    stacks: list["Stack"] = field(default_factory=list)
    filesystems: dict[str, "FileSystem"] = field(default_factory=dict)
    clusters: dict[str, "Cluster"] = field(default_factory=dict)
    models: dict[str, dict[str, Any]] = field(default_factory=dict)  # requests of CreateModel
    endpoint_configs: dict[str, dict[str, Any]] = field(default_factory=dict)
    endpoints: dict[str, "Hosted"] = field(default_factory=dict)
    components: dict[str, "Hosted"] = field(default_factory=dict)  # inference components
    scalable_targets: dict[str, dict[str, Any]] = field(default_factory=dict)
    training_jobs: dict[str, "TrainingJob"] = field(default_factory=dict)
    capacity_taken: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def seconds(self, name: str) -> float:
        return self.world.scenario.seconds[name]

    def until_over(self, name: str) -> Process:
        """The same as a process, in which a test can set fewer seconds, once it has seen the state in between."""
        passed = 0.0
        while True:
            step = min(max(self.seconds(name) - passed, 0.0), 0.05)
            yield step
            passed += step
            if passed >= self.seconds(name):
                return

    def client(self, service: str) -> Any:
        """The server as its own client: CloudFormation and HyperPod act in an account through the same API."""
        return _client(self.world.endpoint, self.name, service)

    def interfaces_in(self, *, subnet: str = "", security_group: str = "") -> bool:
        """Whether a file system or a cluster has network interfaces in it; AWS then refuses to delete it."""
        uses = [(f.subnets, f.security_groups) for f in self.filesystems.values()]
        uses += [(c.subnets, c.security_groups) for c in self.clusters.values()]
        return any(subnet in subnets or security_group in groups for subnets, groups in uses)


@functools.cache
def _client(endpoint: str, region: str, service: str) -> Any:
    # one attempt, so that a failure is seen; it answers at once, but on a machine with too much to do
    config = Config(retries={"mode": "standard", "total_max_attempts": 1}, connect_timeout=300, read_timeout=300)
    return boto3.client(
        service,
        endpoint_url=endpoint,
        region_name=region,
        aws_access_key_id="testing-server",
        aws_secret_access_key="testing-server",
        config=config,
    )
