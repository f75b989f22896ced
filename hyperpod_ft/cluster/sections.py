"""The sections of a cluster file: instance groups, file system, users, keys, existing resources."""

import base64
import binascii
import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from hyperpod_ft.config.fields import (
    FileSystemId,
    PositiveInt,
    RoleArn,
    Section,
    SecurityGroup,
    Subnet,
    TrainingPlanArn,
    matches,
)

KINDS = (
    "ssh-ed25519",
    "ecdsa-sha2-nistp256",
    "ecdsa-sha2-nistp384",
    "ecdsa-sha2-nistp521",
    "ssh-rsa",
    "sk-ssh-ed25519@openssh.com",
    "sk-ecdsa-sha2-nistp256@openssh.com",
)


def key_problem(line: str) -> str:
    """What keeps a line from being a public ssh key (kind, base64, comment; no options before them); empty: nothing."""
    match = re.fullmatch(r"(\S+) ([A-Za-z0-9+/]+={0,2})( .*)?", line)
    if match is None or not line.isprintable() or match[1] not in KINDS:
        return f"must be one line with an ssh public key (one of {', '.join(KINDS)}, then base64)"
    try:
        data = base64.b64decode(match[2], validate=True)
    except binascii.Error:
        data = b""
    # RFC 4253, 6.6: the key's data starts with its kind, as a string with its length in four bytes
    begins = len(match[1]).to_bytes(4, "big") + match[1].encode()
    if not data.startswith(begins) or len(data) == len(begins):
        return f"the data is not a {match[1]} key; copy the line again"
    return ""


def checked_key(line: str) -> str:
    """The line. Raises ValueError if it is not a public key."""
    if wrong := key_problem(line):
        raise ValueError(wrong)
    return line


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
    volume_gb: Annotated[PositiveInt, Field(le=16384)] = Field(500, description="GB of the volume at /opt/sagemaker.")
    image_id: Annotated[str, matches(r"ami-[0-9a-f]{8,17}", "the id of an image, ami-...")] | None = Field(
        None,
        description="Your own image, in this account and built on one of HyperPod's. Default: HyperPod's newest."
        " `cluster update --image` changes it later.",
    )


class Controller(InstanceGroup):
    """The node that slurmctld runs on."""

    name: Name = Field("controller-machine", description="Its name.")
    instance_type: InstanceType = Field("ml.c5.xlarge", description="Its type.")

    @field_validator("count")
    @classmethod
    def _one(cls, value: int) -> int:
        if value != 1:
            raise ValueError("must be 1, because slurmctld runs on one node")
        return value


class Login(InstanceGroup):
    """Login nodes. Without this section, users log in on the controller."""

    name: Name = Field("login-group", description="Its name.")
    instance_type: InstanceType = Field("ml.m5.xlarge", description="Its type.")


class Workers(InstanceGroup):
    """Groups that run the jobs, at least one."""

    name: Name = Field(description="Its name.")
    instance_type: InstanceType = Field(description="Its type, such as `ml.trn1.32xlarge`.")
    partition: Name | None = Field(
        None,
        description="Slurm partition. Default: the type's family, such as `trn1`. With provisioning `api`, different"
        " types need different partitions, and `dev` is HyperPod's, with all nodes.",
    )
    deep_health_checks: tuple[Literal["InstanceStress", "InstanceConnectivity", "MultiNodeTrainingValidation"], ...] = (
        Field(
            (),
            description="What HyperPod runs on each new instance before jobs: tens of minutes, which AWS bills.",
        )
    )
    auto_patch: Literal["WhenIdle", "WhenAllIdle"] | None = Field(
        None,
        description="HyperPod installs security patches: on each node once it is idle, or once the whole group is."
        " `cluster auto-patch` changes it later.",
    )
    training_plan_arn: TrainingPlanArn | None = Field(
        None, description="Training plan that reserves this group's capacity."
    )
    min_count: PositiveInt | None = Field(
        None,
        description="With fewer instances after three hours, HyperPod releases those of a new group. Needs"
        " `continuous_provisioning`.",
    )

    @model_validator(mode="after")
    def _at_most_all(self) -> "Workers":
        if self.min_count and self.min_count > self.count:
            raise ValueError(f"min_count: is {self.min_count}, more than count: {self.count}; lower it")
        return self

    @property
    def slurm_partition(self) -> str:
        return self.partition or self.instance_type.split(".")[1]


class Lustre(Section):
    """The shared file system, FSx for Lustre (PERSISTENT_2, SSD)."""

    size_gib: PositiveInt = Field(FSX_FIRST_GIB, description="1200, or a multiple of 2400.")
    throughput: Literal[125, 250, 500, 1000] = Field(250, description="MB/s per TiB.")
    compression: Literal["LZ4", "NONE"] = Field("LZ4", description="Compression on disk.")
    mount_path: MountPath = Field("/fsx", description="Where every node mounts it.")

    @field_validator("size_gib")
    @classmethod
    def _offered(cls, value: int) -> int:
        if value != FSX_FIRST_GIB and value % FSX_STEP_GIB:
            more = (value // FSX_STEP_GIB + 1) * FSX_STEP_GIB if value > FSX_FIRST_GIB else FSX_FIRST_GIB
            raise ValueError(f"must be 1200 or a multiple of 2400 (FSx for Lustre); set {more}")
        return value


class User(Section):
    """Users of every node, besides the image's `ubuntu`."""

    name: Annotated[str, matches(LINUX_USER, "a Linux user name of at most 32 lower-case letters, digits, _ and -")] = (
        Field(description="Login name. The home is `<mount_path>/<name>`.")
    )
    uid: Annotated[PositiveInt, Field(ge=FIRST_USER_ID, le=LAST_USER_ID)] = Field(
        description=f"User id, {FIRST_USER_ID} to {LAST_USER_ID}. Files belong to this id: never give it to another"
        " person."
    )
    gid: Annotated[PositiveInt, Field(ge=FIRST_USER_ID, le=LAST_USER_ID)] | None = Field(
        None, description="Id of the user's own group. Default: `uid`."
    )

    public_keys: tuple[Annotated[str, AfterValidator(checked_key)], ...] = Field(
        (),
        description="Public ssh keys, as in `id_ed25519.pub`. `cluster ssh` logs in as the user who has your key.",
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
    """Your own resources, all in one zone, instead of the kit's stack."""

    subnet_id: Subnet = Field(description="Private subnet of all nodes.")
    security_group_ids: Annotated[tuple[SecurityGroup, ...], Field(min_length=1, max_length=5)] = Field(
        description="Security groups of all nodes. One of them (with EFA, each) must allow all traffic between its"
        " members."
    )
    execution_role_arn: RoleArn = Field(description="Role of the nodes. It must trust sagemaker.amazonaws.com.")
    bucket: Annotated[str, matches(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", "the name of an S3 bucket")] = Field(
        description="Bucket for the lifecycle scripts. Its name must start with `sagemaker-`."
    )
    fsx_id: FileSystemId = Field(description="FSx for Lustre file system.")


class AccountingDatabase(Section):
    """Your own MySQL-compatible database, for `accounting: rds`."""

    endpoint: Annotated[
        str, matches(r"(?=.{1,255}$)[a-zA-Z0-9]([a-zA-Z0-9.-]*[a-zA-Z0-9])?", "a host name, without a port")
    ] = Field(description="Its host name. Its security group must admit the nodes.")
    port: Annotated[PositiveInt, Field(le=65535)] = Field(3306, description="Its port.")
    name: Annotated[str, matches(r"[a-zA-Z0-9$_]{1,64}", "letters, digits, $ and _")] | None = Field(
        None, description="Schema. Default: `slurm_acct_db_` and the cluster's id."
    )
    secret_arn: Annotated[
        str, matches(r"arn:aws[a-z\-]*:secretsmanager:[a-z0-9\-]*:[0-9]{12}:secret:.+", "the ARN of a secret")
    ] = Field(description="Secret of Secrets Manager: name and password of a user who may create the schema.")


KmsKey = Annotated[
    str,
    matches(r"arn:aws[a-z\-]*:kms:[a-z0-9\-]+:\d{12}:key/[a-zA-Z0-9\-]+", "the ARN of a KMS key, not of an alias"),
]


class KmsKeys(Section):
    """ARNs of your own KMS keys, instead of AWS's. One key may serve all three."""

    volumes: KmsKey | None = Field(
        None,
        description="Key of all volumes of the nodes. Needs `continuous_provisioning`. Cannot be changed.",
    )
    fsx: KmsKey | None = Field(None, description="Key of the file system. Cannot be changed. Not with `existing`.")
    bucket: KmsKey | None = Field(None, description="Key of the bucket's objects. Not with `existing`.")

    @property
    def given(self) -> dict[str, str]:
        """ARN of each key that is set, by its key in the cluster file."""
        named = {"volumes": self.volumes, "fsx": self.fsx, "bucket": self.bucket}
        return {f"kms_keys.{name}": arn for name, arn in named.items() if arn}

    def problem(self, region: str, *, existing: bool, continuous: bool) -> str:
        """Why a cluster cannot have these keys; empty if it can."""
        for key, arn in self.given.items():
            if (of := arn.split(":")[3]) != region:
                return f"{key}: the key is in {of}; name one of {region}"
        if existing and (self.fsx or self.bucket):
            return "kms_keys: with `existing` only volumes: file system and bucket have their own; remove the others"
        if self.volumes and not continuous:
            return "kms_keys.volumes: HyperPod needs provisioning api and continuous_provisioning; set both"
        return ""
