"""ClusterConfig: every key of a cluster file, with its meaning, unit and default.

Refuses what is wrong in any account; `aws.validation` checks the rest. `docs/cluster-file.md` is generated from this
module.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from hyperpod_ft.config import public_key, yaml_file
from hyperpod_ft.config.fields import PositiveInt, Section, matches, shortened
from hyperpod_ft.config.kms_keys import KmsKeys
from hyperpod_ft.config.yaml_file import FileKind
from hyperpod_ft.shipped import shipped

# botocore's patterns of ClusterName, ClusterInstanceGroupName and ClusterPartitionName
Name = Annotated[
    str,
    matches(
        r"(?=.{1,63}$)[a-zA-Z0-9](-*[a-zA-Z0-9])*", "at most 63 letters and digits, with hyphens only between them"
    ),
]
InstanceType = Annotated[
    str,
    matches(r"ml\.[a-z0-9-]+\.[a-z0-9]+", "a SageMaker instance type with its prefix ml., such as ml.trn1.32xlarge"),
]
# valid for FsxLustreConfig.MountPath, in a shell and in lifecycle/provision/settings.py
MOUNT_PATH = r"(/[A-Za-z0-9_][A-Za-z0-9._-]*)+"
MountPath = Annotated[str, matches(MOUNT_PATH, "an absolute path of letters, digits and ._-, such as /fsx")]
LINUX_USER = r"[a-z_][a-z0-9_-]{0,31}"
FSX_FIRST_GIB, FSX_STEP_GIB = 1200, 2400  # sizes of FSx for Lustre SSD file systems
FIRST_USER_ID, LAST_USER_ID = (
    1001,
    59999,
)  # below: system users and the image's default user; above: reserved, such as nobody
_TAKEN_NAMES = ("root", "ubuntu", "slurm", "munge", "nobody", "mysql", "sshd", "daemon")


class InstanceGroup(Section):
    """Instances of one type and role."""

    name: Name
    instance_type: InstanceType
    count: Annotated[PositiveInt, Field(le=6758)] = Field(1, description="Number of instances.")
    threads_per_core: Literal[1, 2] = Field(1, description="2 turns hyper-threading on.")
    volume_gb: Annotated[PositiveInt, Field(le=16384)] = Field(
        500, description="Size of the volume at /opt/sagemaker, in GB."
    )
    image_id: Annotated[str, matches(r"ami-[0-9a-f]{8,17}", "the id of an image, ami-...")] | None = Field(
        None,
        description="Your own image, of this account and built on one of HyperPod's; by default HyperPod's newest."
        " Of an existing group, `cluster update --image` changes it.",
    )


class Controller(InstanceGroup):
    """The node that slurmctld runs on."""

    name: Name = Field("controller-machine", description="Name of the instance group.")
    instance_type: InstanceType = Field("ml.c5.xlarge", description="Type of the instance.")

    @field_validator("count")
    @classmethod
    def _one(cls, value: int) -> int:
        if value != 1:
            raise ValueError("must be 1, because slurmctld runs on one node")
        return value


class Login(InstanceGroup):
    """Login nodes. Without this section, users log in on the controller."""

    name: Name = Field("login-group", description="Name of the instance group.")
    instance_type: InstanceType = Field("ml.m5.xlarge", description="Type of the instances.")


class Workers(InstanceGroup):
    """Worker groups, which run the jobs; at least one."""

    name: Name = Field(description="Name of the instance group, such as `worker-group-1`.")
    instance_type: InstanceType = Field(description="Type of the instances, such as `ml.trn1.32xlarge`.")
    partition: Name | None = Field(
        None,
        description="Slurm partition of the group; if not set, the family of its type, such as `trn1`. With"
        " provisioning `api`, groups of different types have different partitions, and none may be `dev`, into which"
        " HyperPod puts all nodes.",
    )
    deep_health_checks: tuple[Literal["InstanceStress", "InstanceConnectivity", "MultiNodeTrainingValidation"], ...] = (
        Field(
            (),
            description="Health checks that HyperPod runs on each new instance before it takes jobs. They take tens of"
            " minutes, which are billed.",
        )
    )
    auto_patch: Literal["WhenIdle", "WhenAllIdle"] | None = Field(
        None,
        description="Have HyperPod install security patches by itself: on each node when it is idle, or on all of the"
        " group at once. Of an existing group, `cluster auto-patch` changes it.",
    )
    training_plan_arn: (
        Annotated[
            str,
            matches(r"arn:aws[a-z\-]*:sagemaker:[a-z0-9\-]*:[0-9]{12}:training-plan/.+", "the ARN of a training plan"),
        ]
        | None
    ) = Field(None, description="Training plan that reserves the capacity of this group.")

    @property
    def slurm_partition(self) -> str:
        return self.partition or self.instance_type.split(".")[1]


class Lustre(Section):
    """The shared file system, FSx for Lustre (PERSISTENT_2, SSD)."""

    size_gib: PositiveInt = Field(FSX_FIRST_GIB, description="Size in GiB: 1200, or a multiple of 2400.")
    throughput: Literal[125, 250, 500, 1000] = Field(250, description="Throughput in MB/s per TiB.")
    compression: Literal["LZ4", "NONE"] = Field("LZ4", description="Compression of the data on disk.")
    mount_path: MountPath = Field("/fsx", description="Directory where every node mounts it.")

    @field_validator("size_gib")
    @classmethod
    def _offered(cls, value: int) -> int:
        if value != FSX_FIRST_GIB and value % FSX_STEP_GIB:
            more = (value // FSX_STEP_GIB + 1) * FSX_STEP_GIB if value > FSX_FIRST_GIB else FSX_FIRST_GIB
            raise ValueError(f"must be 1200 or a multiple of 2400 (FSx for Lustre); set {more}")
        return value


class User(Section):
    """Users on every node, in addition to `ubuntu`, which the image has."""

    name: Annotated[str, matches(LINUX_USER, "a Linux user name of at most 32 lower-case letters, digits, _ and -")] = (
        Field(description="Login name. The home directory is <mount_path>/<name>.")
    )
    uid: Annotated[PositiveInt, Field(ge=FIRST_USER_ID, le=LAST_USER_ID)] = Field(
        description=f"User id on every node, {FIRST_USER_ID} to {LAST_USER_ID}. Files on the shared volume belong"
        " to this id: never give it to another person."
    )
    gid: Annotated[PositiveInt, Field(ge=FIRST_USER_ID, le=LAST_USER_ID)] | None = Field(
        None, description="Id of the user's own group; the user id if not set."
    )

    public_keys: tuple[Annotated[str, AfterValidator(public_key.checked)], ...] = Field(
        (),
        description="Public ssh keys of this person, as in `id_ed25519.pub`: they open this account, and `cluster ssh`"
        " logs in as the user who has the caller's key.",
    )

    @property
    def group_id(self) -> int:
        return self.uid if self.gid is None else self.gid

    @field_validator("name")
    @classmethod
    def _free(cls, value: str) -> str:
        if value in _TAKEN_NAMES:
            raise ValueError("is already a user of the image; choose another name")
        return value


class Existing(Section):
    """Existing resources to use, all in one zone. Without this section, the kit creates its own stack."""

    subnet_id: Annotated[str, matches(r"subnet-[0-9a-f]{8,17}", "the id of a subnet")] = Field(
        description="Private subnet of all nodes."
    )
    security_group_ids: Annotated[
        tuple[Annotated[str, matches(r"sg-[0-9a-f]{8,17}", "the id of a security group")], ...],
        Field(min_length=1, max_length=5),
    ] = Field(
        description="Security groups of all nodes. With types that have EFA, each must allow all traffic between its"
        " members, in both directions; otherwise one of them."
    )
    execution_role_arn: Annotated[
        str, matches(r"arn:aws[a-z\-]*:iam::\d{12}:role/?[a-zA-Z_0-9+=,.@\-_/]+", "the ARN of a role")
    ] = Field(description="Role of the nodes; must trust sagemaker.amazonaws.com.")
    bucket: Annotated[str, matches(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", "the name of an S3 bucket")] = Field(
        description="Bucket for the lifecycle scripts; HyperPod requires a name that starts with `sagemaker-`."
    )
    fsx_id: Annotated[str, matches(r"fs-[0-9a-f]{8,17}", "the id of a file system")] = Field(
        description="FSx for Lustre file system."
    )


class AccountingDatabase(Section):
    """Your own MySQL-compatible database, such as Amazon RDS, with `accounting: rds`."""

    endpoint: Annotated[
        str, matches(r"(?=.{1,255}$)[a-zA-Z0-9]([a-zA-Z0-9.-]*[a-zA-Z0-9])?", "a host name, without a port")
    ] = Field(description="Host name of the database. Its security group must admit the nodes.")
    port: Annotated[PositiveInt, Field(le=65535)] = Field(3306, description="Port of the database.")
    name: Annotated[str, matches(r"[a-zA-Z0-9$_]{1,64}", "letters, digits, $ and _")] | None = Field(
        None, description="Name of the schema; by default `slurm_acct_db_` and the cluster's id."
    )
    secret_arn: Annotated[
        str, matches(r"arn:aws[a-z\-]*:secretsmanager:[a-z0-9\-]*:[0-9]{12}:secret:.+", "the ARN of a secret")
    ] = Field(description="Secret of Secrets Manager with the name and password of a user who may create the schema.")


class ClusterConfig(Section):
    """One cluster."""

    name: Name = Field(description="Name of the cluster.")
    region: Annotated[str, matches(r"[a-z]{2,4}(-[a-z]+)+-\d", "an AWS region, such as us-west-2")] = Field(
        description="AWS region."
    )
    availability_zone_id: Annotated[
        str, matches(r"[a-z]{3,5}\d-az\d", "the id of an availability zone, such as usw2-az4, not its name")
    ] = Field(
        description="Id of the availability zone of all nodes and of the file system. Names (us-west-2a) mean different"
        " zones in different accounts."
    )
    provisioning: Literal["api", "legacy"] = Field(
        "api",
        description="`api`: HyperPod sets up Slurm, and the lifecycle scripts configure the rest. `legacy`: the scripts"
        " set up Slurm as in provisioning_parameters.json; for images older than 2026.",
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
        description="The cluster is in service as soon as its controller is, and HyperPod keeps trying to launch"
        " missing workers. If false, one worker that cannot be launched fails the whole cluster. Only with"
        " provisioning `api`.",
    )
    accounting: Literal["controller", "rds"] | None = Field(
        None,
        description="Where the database of Slurm's accounting is. `controller`: a MariaDB there, which HyperPod sets up"
        " without this key too, and the scripts of provisioning `legacy` only with it. `rds`: that of"
        " `accounting_database`, which outlives the controller; only with `continuous_provisioning`, and there is no"
        " way back.",
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


CLUSTER_FILE = FileKind(ClusterConfig, "docs/cluster-file.md", "hyperpod-ft cluster init")


def example() -> Path:
    """A commented cluster file to start from."""
    return shipped("templates") / "cluster" / "cluster.yaml"


def load(path: Path, overrides: tuple[str, ...] = ()) -> ClusterConfig:
    """Read, override (`a.b=value`) and validate a cluster file. Raises UserError or ConfigError."""
    values: dict[str, Any] = yaml_file.parse(CLUSTER_FILE, path)
    for text in overrides:
        yaml_file.override(CLUSTER_FILE, values, text)
    return yaml_file.validate(CLUSTER_FILE, values, str(path))
