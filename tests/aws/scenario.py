"""What a test can set in the stand-in for AWS, besides AWS's own API: how long things take, and what goes wrong.

`POST /_test/scenario` merges a JSON object of these fields into the scenario (lists are replaced), or
refuses it with status 400; `POST /_test/reset`
forgets everything: resources, scenario, requests; `POST /_test/begin` the scenario and requests alone.
`GET /_test/requests` lists [service, operation] of all calls since.

    seconds            how long things take, by name; the defaults are below. Tests that look at a state in between set
                       it long, and all others leave it short. Those marked `*` can be set short again meanwhile.
    lifecycle          {instance group: {"lines": [...], "exit": 1, "times": 1}}: lines of the lifecycle log of that
                       group's nodes; with an exit code other than 0 the first `times` of its nodes fail
    capacity           {instance type: nodes that AWS can give}; any number without an entry
    quotas             {"ml.trn1.32xlarge for cluster usage": 4}: Service Quotas of SageMaker; others are in quotas.py
    extension_issues   [{"Code", "Message", "NodeCount"}]: what keeps an extension from working on so many nodes
    fail_resources     {CloudFormation type: reason}: creating such a resource fails
    fail_deletions     {CloudFormation type: reason}: deleting such a resource fails
    denied_actions     {role: ["s3:*"]}: what IAM's policy simulator denies
    endpoint_container {"broken": message of a container that ends at once, "hangs": true if it never
                       answers, "answers": {prompt: answer} of a server that starts at once, instead of the kit's}
    prices             {"ml.g6.2xlarge": US dollars an hour of an endpoint}
    training_plans     {name: fields of DescribeTrainingPlan}
    plan_offerings     [fields of a plan that SearchTrainingPlanOfferings offers, when they fit the request]
    file_systems       {FSx id: local directory}: what training jobs mount; the first part of a DirectoryPath, the
                       mount name, stands for it
    interruptions      {training job, or a pattern such as "*-train-1": [["spot" | "internal error", step], ...]}:
                       happen to it one after another, each when it has printed `step N/` of at least that step; step 0:
                       as soon as its containers run
    errors             [{"service", "operation" (or absent), "code", "message", "status": 400, "times": 1}]: calls that
                       are answered with an error, e.g. ThrottlingException for the first three DescribeCluster
"""

from fnmatch import fnmatchcase
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, with_config
from typing_extensions import TypedDict

SECONDS = {
    "stack.resource": 0.002,  # each resource of a stack, created, updated or deleted
    "fsx.create": 0.05,
    "fsx.delete": 0.05,
    "cluster.create": 0.02,  # * before the first node
    "cluster.update": 0.02,
    "cluster.rollback": 0.02,
    "cluster.delete.shown": 0.0,  # until DescribeCluster shows it
    "cluster.delete": 0.05,
    "node.launch": 0.03,
    "node.lifecycle": 0.03,
    "node.shutdown.shown": 0.0,  # until ListClusterNodes shows it
    "node.shutdown": 0.03,
    "node.reboot": 0.03,  # *
    "node.update": 0.03,
    "extension.shown": 0.0,  # until DescribeClusterExtension shows that it changes
    "extension.node": 0.05,  # installing (*) or removing an extension, on all nodes at once
    "node.failed": 0.03,  # how long a failed node is listed
    "endpoint.create": 0.05,  # instances and image
    "endpoint.health": 600.0,  # how long a container may take until it answers /ping
    "endpoint.delete": 0.05,
    "training.start": 0.03,
    "training.download": 0.01,
    "training.upload": 0.01,
    "training.interrupted": 0.05,  # until other instances are there
    "training.grace": 120.0,  # between SIGTERM and SIGKILL
    "capacity.wait": 0.1,  # until HyperPod gives up (with continuous provisioning: tries again)
}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Failure(_Strict):
    """Calls that are answered with an error."""

    service: str
    operation: str | None = None
    code: str
    message: str = ""
    status: int = 400
    times: int = 1


@with_config(extra="forbid")
class Lifecycle(TypedDict, total=False):
    lines: list[str]
    exit: int
    times: int


@with_config(extra="forbid")
class EndpointContainer(TypedDict, total=False):
    broken: str
    hangs: bool
    answers: dict[str, str]


class Scenario(_Strict):
    seconds: dict[str, float] = Field(default_factory=lambda: dict(SECONDS))
    lifecycle: dict[str, Lifecycle] = {}
    capacity: dict[str, int] = {}
    quotas: dict[str, float] = {}
    fail_resources: dict[str, str] = {}
    fail_deletions: dict[str, str] = {}
    denied_actions: dict[str, list[str]] = {}
    training_plans: dict[str, dict[str, Any]] = {}
    plan_offerings: list[dict[str, Any]] = []
    endpoint_container: EndpointContainer = {}
    prices: dict[str, float] = {}
    file_systems: dict[str, str] = {}
    interruptions: dict[str, list[tuple[Literal["spot", "internal error"], int]]] = {}
    extension_issues: list[dict[str, Any]] = []
    errors: list[Failure] = []

    @field_validator("seconds")
    @classmethod
    def _known(cls, seconds: dict[str, float]) -> dict[str, float]:
        if unknown := seconds.keys() - SECONDS.keys():
            raise ValueError(f"unknown durations: {sorted(unknown)}; known: {sorted(SECONDS)}")
        return seconds

    def merge(self, changes: bytes) -> None:
        """Raises ValueError for JSON of another shape: a misspelt scenario must neither pass nor fail later."""
        changed = Scenario.model_validate_json(changes)
        for name in changed.model_fields_set:
            value = getattr(changed, name)
            if isinstance(value, dict):
                getattr(self, name).update(value)
            else:
                setattr(self, name, value)

    def interruptions_of(self, job: str) -> list[tuple[str, int]]:
        """Those that are still to happen to a training job; what is removed from the list has happened."""
        return next((found for pattern, found in self.interruptions.items() if fnmatchcase(job, pattern)), [])

    def error_for(self, service: str, operation: str) -> Failure | None:
        for error in self.errors:
            if error.service == service and error.operation in (None, operation) and error.times:
                error.times -= 1
                return error
        return None
