"""What `hyperpod-ft sagemaker validate` checks in the account: quotas, images, role, permissions, network, plan."""

import itertools
import re
from dataclasses import replace
from functools import partial

from hyperpod_ft.aws.s3.location import Location
from hyperpod_ft.aws.session import error_code
from hyperpod_ft.aws.validation import (
    capacity_checks,
    filesystem_checks,
    network_checks,
    permission_checks,
    quota_checks,
    state_checks,
)
from hyperpod_ft.aws.validation.check_input import CheckInput
from hyperpod_ft.aws.validation.permission_checks import Need
from hyperpod_ft.aws.validation.validate import Check
from hyperpod_ft.findings import Finding, error, warning
from hyperpod_ft.launch.sagemaker.groups import StageGroup, groups, job_name, sagemaker_section
from hyperpod_ft.launch.sagemaker.images import image
from hyperpod_ft.runs.run import Run

_ECR_IMAGE = re.compile(r"(\d{12})\.dkr\.ecr\.([a-z0-9-]+)\.amazonaws\.com(?:\.cn)?/([^:@]+):([^@]+)")
_NETWORK_ACTIONS = (
    *("ec2:CreateNetworkInterface", "ec2:CreateNetworkInterfacePermission", "ec2:DeleteNetworkInterface"),
    *("ec2:DeleteNetworkInterfacePermission", "ec2:DescribeNetworkInterfaces", "ec2:DescribeVpcs"),
    *("ec2:DescribeDhcpOptions", "ec2:DescribeSubnets", "ec2:DescribeSecurityGroups"),
)


def account_checks(run: Run) -> list[Check]:
    """The checks of the account that apply to this run."""
    section = sagemaker_section(run)
    checks = [
        Check("quotas", "cluster.instance_type", partial(_quotas, run)),
        Check("images", "sagemaker.image", partial(_images, run)),
        Check("role", permission_checks.ROLE, permission_checks.role_is_assumable),
        Check("permissions of the role", permission_checks.ROLE, partial(_role_permissions, run)),
        Check(
            "permissions of the role to create the next job",
            permission_checks.ROLE,
            partial(_next_job_permissions, run),
        ),
        Check("your permissions", permission_checks.CALLER, partial(_caller_permissions, run)),
        Check("bucket", state_checks.BUCKET, state_checks.bucket),
    ]
    if section.training_plan:
        checks.append(Check("training plan", "sagemaker.training_plan", _training_plan))
    if section.file_system:
        checks += [
            Check("subnets", network_checks.SUBNET, partial(_subnets, run)),
            Check("file system", filesystem_checks.FSX, _file_system),
        ]
        if run.config.cluster.nodes > 1:
            checks.append(Check("security groups", network_checks.GROUPS, network_checks.security_groups))
    return checks


def _quotas(run: Run, given: CheckInput) -> list[Finding]:
    """The quota of each instance type, of which other jobs may use a part."""
    limits = quota_checks.limits_of(given.clients["service-quotas"], "sagemaker")
    section, findings = sagemaker_section(run), []
    wanted: dict[tuple[str, str], int] = {}
    for group in groups(run.plan.stages):
        instance_type, name = group.instance_type(run), _quota(run, group)
        of_training = instance_type == run.config.cluster.instance_type
        key = "cluster.instance_type" if of_training else "sagemaker.cpu_instance_type"
        wanted[name, key] = max(group.nodes, wanted.get((name, key), 0))
        if section.keep_alive and group.starts_ranks:
            wanted[f"ml.{instance_type} for training warm pool usage", "sagemaker.keep_alive"] = group.nodes
    at_once = _at_once(run)
    for (name, key), needed in wanted.items():
        if name not in limits:
            findings.append(warning(key, *quota_checks.not_listed(name)))
        elif needed > limits[name]["Value"]:
            findings.append(error(key, *quota_checks.quota_shortfall(given.config.region, limits[name], needed, 0)))
        elif at_once.get(name, 0) > limits[name]["Value"]:
            _, request = quota_checks.quota_shortfall(given.config.region, limits[name], at_once[name], 0)
            problem = f"quota `{name}` is {limits[name]['Value']:g}: too small for a job and the one before it"
            remedy = f"keep `submit --watch` running, or call `status`, which creates the next job; or {request}"
            findings.append(warning(key, problem, remedy))
    return findings


def _quota(run: Run, group: StageGroup) -> str:
    """The name of the quota that its instances count towards."""
    spot = "spot " if sagemaker_section(run).spot and group.starts_ranks else ""
    return f"ml.{group.instance_type(run)} for {spot}training job usage"


def _at_once(run: Run) -> dict[str, int]:
    """Instances, by quota, that count while a container creates the job after its own, which may be a training run
    that continues it."""
    found = groups(run.plan.stages)
    followed = [*itertools.pairwise(found), *((group, group) for group in found if group.starts_ranks)]
    needed: dict[str, int] = {}
    for group, next_group in followed:
        name = _quota(run, group)
        if name == _quota(run, next_group):
            needed[name] = max(group.nodes + next_group.nodes, needed.get(name, 0))
    return needed


def _images(run: Run, given: CheckInput) -> list[Finding]:
    """Images in ECR exist. Others are left to the job."""
    findings, ecr = [], given.clients["ecr"]
    types = [group.instance_type(run) for group in groups(run.plan.stages)]
    for uri in dict.fromkeys(image(run.config, instance_type) for instance_type in types):
        parts = _ECR_IMAGE.fullmatch(uri)
        if parts is None or parts[2] != given.config.region:
            problem = f"could not check {uri}: it is not in ECR in {given.config.region}"
            findings.append(warning("sagemaker.image", problem, "make sure that SageMaker can pull it"))
            continue
        try:
            answer = ecr.batch_get_image(
                registryId=parts[1], repositoryName=parts[3], imageIds=[{"imageTag": parts[4]}]
            )
        except ecr.exceptions.ClientError as problem:
            if error_code(problem) != "RepositoryNotFoundException":
                raise
            answer = {"images": []}
        if not answer["images"]:
            findings.append(
                error("sagemaker.image", f"no image {uri}", "set sagemaker.image to the URI of one that exists")
            )
    return findings


def _role_permissions(run: Run, given: CheckInput) -> list[Finding]:
    """The role allows what the containers do."""
    where = f"arn:{given.partition}:{{}}:{given.config.region}:{given.account_id}"
    stream = f"{where.format('logs')}:log-group:/aws/sagemaker/TrainingJobs:log-stream:job/algo-1-1"
    needs = [Need(("logs:CreateLogStream", "logs:PutLogEvents"), stream), *_store_needs(run, given)]
    needs.append(Need(("ecr:GetAuthorizationToken",)))
    if sagemaker_section(run).file_system:
        needs.append(Need(_NETWORK_ACTIONS))
    remedy = "`hyperpod-ft sagemaker setup` makes a role that may, or allow these actions"
    return permission_checks.check_role_has(given, needs, remedy)


def _next_job_permissions(run: Run, given: CheckInput) -> list[Finding]:
    """A job's container creates the next job at its end; without these permissions, `status` does."""
    remedy = "allow these, or keep `submit --watch` running: `status` creates the next job too"
    found = permission_checks.check_role_has(given, list(_creation_needs(run, given)), remedy)
    return [replace(finding, verdict="warning") for finding in found]


def _caller_permissions(run: Run, given: CheckInput) -> list[Finding]:
    """These credentials allow what the commands do."""
    (create, pass_role) = _creation_needs(run, given)
    needs = [
        replace(create, actions=(*create.actions, "sagemaker:StopTrainingJob")),
        Need(("sagemaker:ListTrainingJobs",)),
        pass_role,
        *_store_needs(run, given),
        Need(
            ("logs:DescribeLogStreams", "logs:GetLogEvents"),
            f"arn:{given.partition}:logs:{given.config.region}:{given.account_id}"
            ":log-group:/aws/sagemaker/TrainingJobs:*",
        ),
    ]
    return permission_checks.check_caller_has(given, needs)


def _subnets(run: Run, given: CheckInput) -> list[Finding]:
    """All exist and are in one zone, with addresses for every instance."""
    mounted = sagemaker_section(run).file_system
    assert mounted is not None
    zone, findings = None, []
    for subnet_id in mounted.subnets:
        existing = given.existing.model_copy(update={"subnet_id": subnet_id})
        here = replace(given, config=given.config.model_copy(update={"existing": existing}))
        found = here.subnet()
        zone = zone or (found and found["AvailabilityZoneId"])
        config = here.config.model_copy(update={"availability_zone_id": zone})
        findings += network_checks.subnet(replace(here, config=config))
    return findings


def _creation_needs(run: Run, given: CheckInput) -> tuple[Need, Need]:
    jobs = f"arn:{given.partition}:sagemaker:{given.config.region}:{given.account_id}:training-job"
    actions = ("sagemaker:CreateTrainingJob", "sagemaker:DescribeTrainingJob", "sagemaker:AddTags")
    return (
        Need(actions, f"{jobs}/{job_name(run, 'train', 1)}"),
        Need(("iam:PassRole",), sagemaker_section(run).role, {"iam:PassedToService": "sagemaker.amazonaws.com"}),
    )


def _store_needs(run: Run, given: CheckInput) -> list[Need]:
    store = run.config.store
    if store is None:
        return []
    location = Location.of(store)
    arn = f"arn:{given.partition}:s3:::{location.bucket}"
    objects = f"{arn}/{location.key('runs/x')}"
    return [Need(("s3:ListBucket",), arn), Need(("s3:GetObject", "s3:PutObject", "s3:DeleteObject"), objects)]


def _training_plan(given: CheckInput) -> list[Finding]:
    return capacity_checks.training_plans(given, "training-job")


def _file_system(given: CheckInput) -> list[Finding]:
    """The file system is Lustre, in the subnets' zone, and reachable from there."""
    subnet = given.subnet()
    if subnet is None:
        return []  # reported by `subnets`
    config = given.config.model_copy(update={"availability_zone_id": subnet["AvailabilityZoneId"]})
    return filesystem_checks.file_system(replace(given, config=config))
