"""The checks of a cluster file that need no account, credentials or network."""

from collections.abc import Iterable, Iterator

from hyperpod_ft.aws.checks import account, service_model
from hyperpod_ft.aws.checks.service_model import Violation, check_request
from hyperpod_ft.cluster.config import ClusterConfig
from hyperpod_ft.cluster.hyperpod import lifecycle_files, requests
from hyperpod_ft.cluster.hyperpod.request_fields import cluster_file_key, group_keys
from hyperpod_ft.cluster.stack.resources import ClusterResources
from hyperpod_ft.cluster.validation.check_input import instances_of
from hyperpod_ft.config.instances import CATALOGUE
from hyperpod_ft.errors import did_you_mean
from hyperpod_ft.findings import Finding, error, warning

BUCKET_START = "sagemaker-"  # CreateCluster's documentation of SourceS3Uri
PRIVATE_SUBNET = "10.0.0.0/17"  # of templates/cluster/stack.yaml
# Slurm's page "Deep health checks" of the SageMaker developer guide lists tests for GPUs, families g5, p4 and p5; the
# one of EKS clusters lists Trainium too.
_ACCELERATED = ("g", "p", "trn", "inf")


def placeholder(config: ClusterConfig) -> ClusterResources:
    """The cluster file's existing resources, or made-up ids."""
    existing = config.existing
    fsx_id = existing.fsx_id if existing else "fs-0123456789abcdef0"
    return ClusterResources(
        subnet_id=existing.subnet_id if existing else "subnet-0123456789abcdef0",
        security_group_ids=existing.security_group_ids if existing else ("sg-0123456789abcdef0",),
        role_arn=existing.execution_role_arn if existing else "arn:aws:iam::123456789012:role/hyperpod",
        bucket=existing.bucket if existing else "sagemaker-lifecycle",
        fsx_dns_name=f"{fsx_id}.fsx.{config.region}.{service_model.dns_suffix(config.region)}",
        fsx_mount_name="abcdefgh",
    )


def create_request(config: ClusterConfig) -> list[Finding]:
    """The request of CreateCluster against sagemaker's model."""
    resources = placeholder(config)
    uri = f"s3://{resources.bucket}/{lifecycle_files.folder(config, {})}"
    violations = check_request("sagemaker", "CreateCluster", requests.create_cluster(config, resources, uri))
    return list(dict.fromkeys(_finding(config, violation) for violation in violations))


def _finding(config: ClusterConfig, violation: Violation) -> Finding:
    problem, _, remedy = violation.problem.partition("; ")
    return error(cluster_file_key(config, violation.path), problem, remedy or "correct it in the cluster file")


def stack_request(config: ClusterConfig) -> list[Finding]:
    """The stack's name and tags against CloudFormation's model."""
    if config.existing:
        return []
    tags = [{"Key": key, "Value": value} for key, value in sorted(config.tags.items())]
    found = check_request("cloudformation", "CreateStack", {"StackName": config.stack_name, "Tags": tags})
    return [
        error("tags" if path.startswith("Tags") else "name", f"stack {config.stack_name}: {problem}", "correct it")
        for path, problem in found
    ]


def region(config: ClusterConfig) -> Iterator[Finding]:
    offered = service_model.known_regions("sagemaker")
    if config.region in offered:
        return
    hint = did_you_mean(config.region, offered).removeprefix("; ")
    yield error(
        "region",
        f"SageMaker is not offered in {config.region}",
        hint or "set another region, for example us-west-2",
    )


def zone(config: ClusterConfig) -> Iterator[Finding]:
    prefix = service_model.zone_prefix(config.region)
    if prefix is None:
        yield warning(
            "availability_zone_id",
            f"could not check whether {config.availability_zone_id} is in {config.region}",
            f"list the zones: aws ec2 describe-availability-zones --region {config.region}",
        )
        return
    if config.availability_zone_id.rpartition("-az")[0] == prefix:
        return
    yield error(
        "availability_zone_id",
        f"{config.availability_zone_id} is not in {config.region}, whose zones are {prefix}-az1 and so on",
        f"list them: aws ec2 describe-availability-zones --region {config.region}",
    )


def bucket(config: ClusterConfig) -> Iterator[Finding]:
    if config.existing is None or config.existing.bucket.startswith(BUCKET_START):
        return
    yield error(
        "existing.bucket",
        f"HyperPod reads lifecycle scripts only from buckets named {BUCKET_START}..., not from"
        f" {config.existing.bucket}",
        f"name a bucket whose name begins with {BUCKET_START}",
    )


def lifecycle(config: ClusterConfig) -> list[Finding]:
    """The lifecycle files to be uploaded."""
    return lifecycle_files.check(lifecycle_files.files(config, placeholder(config)))


def address_space(config: ClusterConfig) -> Iterator[Finding]:
    """Whether the nodes fit into the private subnet of the kit's stack. An existing one is checked in the account."""
    instances, usable = instances_of(config), account.usable(PRIVATE_SUBNET)
    if config.existing or (wanted := account.wanted(instances)) <= usable:
        return
    yield error(
        "workers",
        f"the nodes need {wanted} IP addresses ({account.breakdown(instances)}); the stack's private subnet"
        f" {PRIVATE_SUBNET} has {usable}",
        "reduce the number of nodes, or create a larger subnet and name it under `existing`",
    )


def deep_health_checks(config: ClusterConfig) -> Iterator[Finding]:
    for key, group in zip(_worker_keys(config), config.workers, strict=True):
        if not group.deep_health_checks:
            continue
        family = account.ec2_type(group.instance_type)
        if not family.startswith(_ACCELERATED):
            problem = f"{group.instance_type} has no accelerators, which deep health checks test"
            yield error(f"{key}.deep_health_checks", problem, "remove the key")
        elif (instance := CATALOGUE.get(family)) and instance.is_neuron:
            problem = "AWS documents these checks on Slurm clusters for GPUs only (on EKS for Trainium too)"
            remedy = "remove the key, or expect that nothing is checked"
            yield warning(f"{key}.deep_health_checks", problem, remedy)


def training_plans(config: ClusterConfig) -> Iterator[Finding]:
    for key, group in zip(_worker_keys(config), config.workers, strict=True):
        planned = group.training_plan_arn.split(":")[3] if group.training_plan_arn else config.region
        if planned != config.region:
            problem = f"the training plan is in {planned}, the cluster in {config.region}"
            yield error(f"{key}.training_plan_arn", problem, f"name a plan in {config.region}")


def _worker_keys(config: ClusterConfig) -> Iterable[str]:
    return group_keys(config)[-len(config.workers) :]
