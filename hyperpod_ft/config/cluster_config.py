"""ClusterConfig: everything a cluster file may say, with its meaning, unit and default.

What cannot be right whatever the account holds is refused here; `validation` says what AWS would refuse.
`docs/cluster-file.md` is generated from this module.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from hyperpod_ft.config import yaml_file
from hyperpod_ft.config.fields import PositiveInt, Section, matches, shortened
from hyperpod_ft.config.yaml_file import FileKind
from hyperpod_ft.shipped import shipped

# botocore's patterns of ClusterName, ClusterInstanceGroupName and ClusterPartitionName
Name = Annotated[
    str,
    matches(r"(?=.{1,63}$)[a-zA-Z0-9](-*[a-zA-Z0-9])*", "letters, digits and single hyphens between, at most 63 long"),
]
InstanceType = Annotated[
    str, matches(r"ml\.[a-z0-9-]+\.[a-z0-9]+", "a SageMaker instance type, which starts with ml., as ml.trn1.32xlarge")
]
# what FsxLustreConfig.MountPath, a shell and lifecycle/provision/settings.py all take
MOUNT_PATH = r"(/[A-Za-z0-9_][A-Za-z0-9._-]*)+"
MountPath = Annotated[str, matches(MOUNT_PATH, "an absolute path of letters, digits and ._-, as /fsx")]
LINUX_USER = r"[a-z_][a-z0-9_-]{0,31}"
FSX_FIRST_GIB, FSX_STEP_GIB = 1200, 2400  # what FSx for Lustre SSD file systems may hold
FIRST_USER_ID, LAST_USER_ID = 1001, 59999  # below are the system's and the image's default user; above is nobody's
_TAKEN_NAMES = ("root", "ubuntu", "slurm", "munge", "nobody", "mysql", "sshd", "daemon")


class InstanceGroup(Section):
    """Instances of one type and one role."""

    name: Name
    instance_type: InstanceType
    count: Annotated[PositiveInt, Field(le=6758)] = Field(1, description="Number of instances.")
    threads_per_core: Literal[1, 2] = Field(1, description="2 switches hyper-threading on.")
    volume_gb: Annotated[PositiveInt, Field(le=16384)] = Field(
        500, description="Size of the volume at /opt/sagemaker, GB."
    )


class Controller(InstanceGroup):
    """Where slurmctld runs."""

    name: Name = Field("controller-machine", description="Name of the instance group.")
    instance_type: InstanceType = Field("ml.c5.xlarge", description="Type of the instance.")

    @field_validator("count")
    @classmethod
    def _one(cls, value: int) -> int:
        if value != 1:
            raise ValueError("must be 1: slurmctld runs on one node")
        return value


class Login(InstanceGroup):
    """Login nodes. Left out, people log in on the controller."""

    name: Name = Field("login-group", description="Name of the instance group.")
    instance_type: InstanceType = Field("ml.m5.xlarge", description="Type of the instances.")


class Workers(InstanceGroup):
    """Worker groups, where jobs run; at least one."""

    name: Name = Field(description="Name of the instance group, as `worker-group-1`.")
    instance_type: InstanceType = Field(description="Type of the instances, as `ml.trn1.32xlarge`.")
    partition: Name = Field("dev", description="Slurm partition of the group.")
    deep_health_checks: tuple[Literal["InstanceStress", "InstanceConnectivity", "MultiNodeTrainingValidation"], ...] = (
        Field(
            (),
            description="What HyperPod checks on each new instance before it takes jobs; some tens of minutes, which"
            " are billed.",
        )
    )
    training_plan_arn: (
        Annotated[
            str,
            matches(r"arn:aws[a-z\-]*:sagemaker:[a-z0-9\-]*:[0-9]{12}:training-plan/.+", "the ARN of a training plan"),
        ]
        | None
    ) = Field(None, description="Training plan whose reserved capacity the group uses.")


class Lustre(Section):
    """The shared file system, FSx for Lustre (PERSISTENT_2, SSD)."""

    size_gib: PositiveInt = Field(FSX_FIRST_GIB, description="1200, or a multiple of 2400, GiB.")
    throughput: Literal[125, 250, 500, 1000] = Field(250, description="MB/s for each TiB.")
    compression: Literal["LZ4", "NONE"] = Field("LZ4", description="Compression of data on disk.")
    mount_path: MountPath = Field("/fsx", description="Where every node mounts it.")

    @field_validator("size_gib")
    @classmethod
    def _offered(cls, value: int) -> int:
        if value != FSX_FIRST_GIB and value % FSX_STEP_GIB:
            more = (value // FSX_STEP_GIB + 1) * FSX_STEP_GIB if value > FSX_FIRST_GIB else FSX_FIRST_GIB
            raise ValueError(f"FSx for Lustre offers 1200 GiB and multiples of 2400; set {more}")
        return value


class User(Section):
    """People besides the image's own `ubuntu`, the same on every node."""

    name: Annotated[str, matches(LINUX_USER, "a Linux user name: lower case, at most 32 long")] = Field(
        description="Login name; the home directory is <mount_path>/<name>."
    )
    uid: Annotated[PositiveInt, Field(ge=FIRST_USER_ID, le=LAST_USER_ID)] = Field(
        description=f"User id on every node, {FIRST_USER_ID} to {LAST_USER_ID}. Files on the shared volume keep it:"
        " never give it to another person."
    )
    gid: Annotated[PositiveInt, Field(ge=FIRST_USER_ID, le=LAST_USER_ID)] | None = Field(
        None, description="Id of the user's own group; the user id when left out."
    )

    @property
    def group_id(self) -> int:
        return self.uid if self.gid is None else self.gid

    @field_validator("name")
    @classmethod
    def _free(cls, value: str) -> str:
        if value in _TAKEN_NAMES:
            raise ValueError("is a user of the image; give another name")
        return value


class Existing(Section):
    """Left out, the kit makes a stack of its own. Resources of yours to use instead: all of them, in one zone."""

    subnet_id: Annotated[str, matches(r"subnet-[0-9a-f]{8,17}", "a subnet's id")] = Field(
        description="Private subnet of all nodes."
    )
    security_group_ids: Annotated[
        tuple[Annotated[str, matches(r"sg-[0-9a-f]{8,17}", "a security group's id")], ...],
        Field(min_length=1, max_length=5),
    ] = Field(description="Security groups of all nodes; one lets its own members reach each other both ways (EFA).")
    execution_role_arn: Annotated[
        str, matches(r"arn:aws[a-z\-]*:iam::\d{12}:role/?[a-zA-Z_0-9+=,.@\-_/]+", "the ARN of a role")
    ] = Field(description="Role of the nodes; trusts sagemaker.amazonaws.com.")
    bucket: Annotated[str, matches(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", "an S3 bucket's name")] = Field(
        description="Bucket for the lifecycle scripts; HyperPod asks that its name starts with `sagemaker-`."
    )
    fsx_id: Annotated[str, matches(r"fs-[0-9a-f]{8,17}", "a file system's id")] = Field(
        description="FSx for Lustre file system."
    )


class ClusterConfig(Section):
    """One cluster."""

    name: Name = Field(description="Name of the cluster.")
    region: Annotated[str, matches(r"[a-z]{2,4}(-[a-z]+)+-\d", "an AWS region, as us-west-2")] = Field(
        description="AWS region."
    )
    availability_zone_id: Annotated[
        str, matches(r"[a-z]{3,5}\d-az\d", "the id of an availability zone, as usw2-az4, not its name")
    ] = Field(
        description="Zone of all nodes and of the file system, by id: names (us-west-2a) mean different zones in"
        " different accounts."
    )
    provisioning: Literal["api", "legacy"] = Field(
        "api",
        description="`api`: HyperPod sets up Slurm, and the lifecycle scripts add to it. `legacy`: the scripts start"
        " it, told by provisioning_parameters.json; for images from before 2026.",
    )
    controller: Controller = Field(default_factory=Controller)
    login: Login | None = None
    workers: Annotated[tuple[Workers, ...], Field(min_length=1, max_length=98)]
    fsx: Lustre = Field(default_factory=Lustre)
    users: tuple[User, ...] = ()
    node_recovery: Literal["Automatic", "None"] = Field(
        "Automatic", description="Whether HyperPod replaces nodes that it finds broken."
    )
    continuous_provisioning: bool = Field(
        True,
        description="The cluster is in service once its controller is, and goes on asking for workers. Otherwise one"
        " worker that cannot be had takes all others down again. Only with provisioning `api`.",
    )
    accounting: bool = Field(
        False, description="Slurm accounting (MariaDB and slurmdbd on the controller). Only with provisioning `legacy`."
    )
    metrics: bool = Field(
        False,
        description="Serve metrics of nodes and NeuronCores (node_exporter, neuron-monitor) where the image has them.",
    )
    tags: dict[str, str] = Field(default_factory=dict, description="Tags of every resource, at most 40.")
    existing: Existing | None = None

    @property
    def groups(self) -> tuple[InstanceGroup, ...]:
        """Every instance group, the controller's first."""
        return (self.controller, *((self.login,) if self.login else ()), *self.workers)

    @property
    def stack_name(self) -> str:
        return stack_name(self.name)

    @field_validator("tags")
    @classmethod
    def _taggable(cls, value: dict[str, str]) -> dict[str, str]:
        if len(value) > 40:
            raise ValueError(f"holds {len(value)} tags; AWS takes 50, of which the kit and AWS need some: at most 40")
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
        if self.accounting and self.provisioning == "api":
            raise ValueError(
                "accounting: HyperPod sets up Slurm under provisioning `api`; leave it out, or set `legacy`"
            )
        return self


def stack_name(cluster: str) -> str:
    """Of the CloudFormation stack that a cluster stands on."""
    return f"hyperpod-{cluster}"


def _unique(what: str, values: list[str]) -> None:
    if twice := sorted({value for value in values if values.count(value) > 1}):
        raise ValueError(f"{what} used twice: {shortened(', '.join(twice))}; give each its own")


CLUSTER_FILE = FileKind(ClusterConfig, "docs/cluster-file.md", "hyperpod-ft cluster init")


def example() -> Path:
    """A cluster file with comments, to start from."""
    return shipped("templates") / "cluster" / "cluster.yaml"


def load(path: Path, overrides: tuple[str, ...] = ()) -> ClusterConfig:
    """Read, override (`a.b=value`) and validate a cluster file. Raises UserError or ConfigError."""
    values: dict[str, Any] = yaml_file.parse(CLUSTER_FILE, path)
    for text in overrides:
        yaml_file.override(CLUSTER_FILE, values, text)
    return yaml_file.validate(CLUSTER_FILE, values, str(path))
