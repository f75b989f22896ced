"""`hyperpod-ft sagemaker validate`: can this run become training jobs? Offline first, then in the account: quotas,
images, role, permissions, network, plan."""

import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from hyperpod_ft.aws.checks import capacity, images, network, role, storage
from hyperpod_ft.aws.checks.account import Account, Check, Instances, Named, Place, ValidationResult, run_checks
from hyperpod_ft.aws.checks.role import Need
from hyperpod_ft.aws.checks.service_model import check_request, known_regions
from hyperpod_ft.aws.s3.objects import Location
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.config.sources import names_one_file
from hyperpod_ft.errors import UserError
from hyperpod_ft.findings import Finding, error, warning
from hyperpod_ft.runs.assets import assets
from hyperpod_ft.runs.run import Run
from hyperpod_ft.sagemaker.groups import NO_MAIL, StageGroup, groups, job_name
from hyperpod_ft.sagemaker.section import RUN_TAG, sagemaker_section, store_of
from hyperpod_ft.sagemaker.training_request import IMAGE, create_training_job, job_images

SERVICES = ("sts", "ec2", "iam", "sagemaker", "service-quotas", "fsx", "s3", "ecr")
ROLE = "sagemaker.role"
_SUBNET, _FSX = "sagemaker.file_system.subnets", "sagemaker.file_system.id"
_SESSION_ACTIONS = (
    *("ssmmessages:CreateControlChannel", "ssmmessages:CreateDataChannel"),
    *("ssmmessages:OpenControlChannel", "ssmmessages:OpenDataChannel"),
)
_NETWORK_ACTIONS = (
    *("ec2:CreateNetworkInterface", "ec2:CreateNetworkInterfacePermission", "ec2:DeleteNetworkInterface"),
    *("ec2:DeleteNetworkInterfacePermission", "ec2:DescribeNetworkInterfaces", "ec2:DescribeVpcs"),
    *("ec2:DescribeDhcpOptions", "ec2:DescribeSubnets", "ec2:DescribeSecurityGroups"),
)


def validate(run: Run, client: Callable[[str], object] | None) -> ValidationResult:
    """Every check; changes nothing. `client`: boto3's for a service in the run's region; None: only offline checks.

    Raises UserError without a section sagemaker, or when boto3 is missing.
    """
    began = time.monotonic()
    found = dict.fromkeys(_offline(run))  # jobs may share a problem
    offline = ValidationResult(tuple(found), ("requests", "region", "images"), (), time.monotonic() - began)
    if client is None or offline.has_errors:
        return offline
    return offline + run_checks(
        run.paths.full_name, account_checks(run), client, SERVICES, partial(Account, place_of(run))
    )


def _offline(run: Run) -> Iterable[Finding]:
    section = sagemaker_section(run.config)
    if section.region not in known_regions("sagemaker"):
        yield error("sagemaker.region", f"SageMaker is not offered in {section.region}", "set another region")
    if run.config.cluster.mail_user:
        yield warning("cluster.mail_user", NO_MAIL, "`hyperpod-ft sagemaker setup --mail ADDRESS`")
    for group in groups(run.plan.stages):
        try:
            request = create_training_job(run, group, job_name(run, group.name, 1), "code")
        except UserError as problem:
            key, _, text = problem.problem.partition(": ")
            yield error(key, text, problem.remedy)
            continue
        for violation in check_request("sagemaker", "CreateTrainingJob", request):
            yield error(
                _key_of(violation.path, group), f"{violation.path} {violation.problem}", "correct it in the run file"
            )


def _key_of(path: str, group: StageGroup) -> str:
    if path == "ResourceConfig.InstanceType":
        return "cluster.instance_type" if group.starts_ranks else "sagemaker.cpu_instance_type"
    return "sagemaker"


def account_checks(run: Run) -> list[Check[Account]]:
    """The checks of the account that apply to this run."""
    section = sagemaker_section(run.config)
    checks: list[Check[Account]] = [
        Check("quotas", "cluster.instance_type", partial(_quotas, run)),
        Check("images", IMAGE, partial(_images, run)),
        Check("role", ROLE, role.is_assumable),
        Check("permissions of the role", ROLE, partial(_role_permissions, run)),
        *(
            Check(f"permissions of the role: {key}", key, partial(_may_read, key, asset.source))
            for key, asset in ((f"{section}.source", asset) for section, _, asset in assets(run.config))
            if asset.kind == "s3" and not run.journal.is_done("download")
        ),
        Check("permissions of the role to create the next job", ROLE, partial(_next_job_permissions, run)),
        Check("bucket", place_of(run).bucket.key, storage.bucket),
    ]
    if section.training_plan:
        checks.append(
            Check("training plan", "sagemaker.training_plan", partial(capacity.training_plans, target="training-job"))
        )
    if section.file_system:
        checks += [Check("subnets", _SUBNET, partial(_subnets, run)), Check("file system", _FSX, _file_system)]
        if run.config.cluster.nodes > 1:
            checks.append(Check("security groups", place_of(run).security_groups[0], network.security_groups))
    return checks


def place_of(run: Run) -> Place:
    """The run's training, and what its section names."""
    section, mounted = sagemaker_section(run.config), sagemaker_section(run.config).file_system
    training = next(group for group in groups(run.plan.stages) if group.starts_ranks)
    instances = Instances(
        f"ml.{training.instance_type(run)}",
        training.nodes,
        "cluster.instance_type",
        "cluster.nodes",
        section.training_plan or "",
        "sagemaker.training_plan",
    )
    store = store_of(run.config)
    return Place(
        "training",
        section.region,
        (instances,),
        role=Named(ROLE, section.role),
        bucket=Named("sagemaker.store" if store else "sagemaker.output", Location.of(section.output_path).bucket),
        subnet=Named(_SUBNET, mounted.subnets[0] if mounted else ""),
        security_groups=("sagemaker.file_system.security_groups", mounted.security_groups if mounted else ()),
        file_system=Named(_FSX, mounted.id if mounted else ""),
    )


def _quotas(run: Run, given: Account) -> list[Finding]:
    """The quota of each instance type, of which other jobs may use a part."""
    limits = capacity.limits_of(given.clients["service-quotas"], "sagemaker")
    section, findings = sagemaker_section(run.config), []
    wanted: dict[tuple[str, str], int] = {}
    for group in groups(run.plan.stages):
        instance_type = group.instance_type(run)
        of_training = instance_type == run.config.cluster.instance_type
        for one in group.instance_types(run):
            key = "cluster.instance_type" if of_training else "sagemaker.cpu_instance_type"
            key, name = key if one == instance_type else "sagemaker.other_instance_types", _quota(run, group, one)
            wanted[name, key] = max(group.nodes, wanted.get((name, key), 0))
        if section.keep_alive and group.starts_ranks:
            wanted[f"ml.{instance_type} for training warm pool usage", "sagemaker.keep_alive"] = group.nodes
    at_once = _at_once(run)
    for (name, key), needed in wanted.items():
        if name not in limits:
            findings.append(warning(key, *capacity.not_listed(name)))
        elif needed > limits[name]["Value"]:
            findings.append(error(key, *capacity.shortfall(given.place.region, limits[name], needed, 0)))
        elif at_once.get(name, 0) > limits[name]["Value"]:
            _, request = capacity.shortfall(given.place.region, limits[name], at_once[name], 0)
            problem = f"quota `{name}` is {limits[name]['Value']:g}: too small for a job and the one before it"
            remedy = f"keep `submit --watch` running, or call `watch`, which creates the next job; or {request}"
            findings.append(warning(key, problem, remedy))
    return findings


def _quota(run: Run, group: StageGroup, instance_type: str) -> str:
    """The name of the quota that its instances of this type count towards."""
    spot = "spot " if sagemaker_section(run.config).spot and group.starts_ranks else ""
    return f"ml.{instance_type} for {spot}training job usage"


def _at_once(run: Run) -> dict[str, int]:
    """Instances, by quota, that count while a container creates the job after its own, which may be a training run
    that continues it."""
    found = groups(run.plan.stages)
    followed = [*itertools.pairwise(found), *((group, group) for group in found if group.starts_ranks)]
    needed: dict[str, int] = {}
    for group, next_group in followed:
        name = _quota(run, group, group.instance_type(run))
        if name == _quota(run, next_group, next_group.instance_type(run)):
            needed[name] = max(group.nodes + next_group.nodes, needed.get(name, 0))
    return needed


def _images(run: Run, given: Account) -> list[Finding]:
    return images.missing(given.clients["ecr"], given.place.region, job_images(run, run.plan.stages), IMAGE)


def _role_permissions(run: Run, given: Account) -> list[Finding]:
    """The role allows what the containers do."""
    where = f"arn:{given.partition}:{{}}:{given.place.region}:{given.account_id}"
    stream = f"{where.format('logs')}:log-group:/aws/sagemaker/TrainingJobs:log-stream:job/algo-1-1"
    needs = [Need(("logs:CreateLogStream", "logs:PutLogEvents"), stream), *_store_needs(run.config, given)]
    needs.append(Need(("ecr:GetAuthorizationToken",)))
    if output := sagemaker_section(run.config).output:
        needs.append(Need(("s3:PutObject",), _objects(given, output)))
    if sagemaker_section(run.config).file_system:
        needs.append(Need(_NETWORK_ACTIONS))
    if sagemaker_section(run.config).remote_debug:
        needs.append(Need(_SESSION_ACTIONS))
    remedy = "`hyperpod-ft sagemaker setup` makes a role that may, or allow these actions"
    return role.has_permissions(given, needs, remedy)


def _may_read(key: str, source: str, given: Account) -> list[Finding]:
    """The role may read a model or dataset in S3, which stage download fetches."""
    read = _objects(given, source)
    if names_one_file(source):
        read = read.removesuffix("/runs/x")
    needs = [Need(("s3:ListBucket",), _bucket(given, source)), Need(("s3:GetObject",), read)]
    remedy = f"allow the role these actions on {source}, or copy it to a bucket that the role may read"
    return [replace(finding, name=key) for finding in role.has_permissions(given, needs, remedy)]


def _next_job_permissions(run: Run, given: Account) -> list[Finding]:
    """A job's container creates the next job at its end; without these permissions, `watch` does."""
    remedy = "allow these, or keep `submit --watch` running: it creates the next job too"
    found = role.has_permissions(given, _creation_needs(run, given), remedy)
    return [replace(finding, verdict="warning") for finding in found]


def _subnets(run: Run, given: Account) -> list[Finding]:
    """All exist and are in one zone, with addresses for every instance."""
    mounted = sagemaker_section(run.config).file_system
    assert mounted is not None
    findings, place = [], given.place
    for subnet_id in mounted.subnets:
        place = replace(place, subnet=Named(_SUBNET, subnet_id))
        found = replace(given, place=place).subnet()
        place = replace(place, zone=place.zone or (found["AvailabilityZoneId"] if found else ""))
        findings += network.subnet(replace(given, place=place))
    return findings


def _creation_needs(run: Run, given: Account) -> list[Need]:
    """What creating the run's jobs takes."""
    jobs = f"arn:{given.partition}:sagemaker:{given.place.region}:{given.account_id}:training-job"
    types = dict.fromkeys(name for group in groups(run.plan.stages) for name in group.instance_types(run))
    context = [
        {f"aws:RequestTag/{RUN_TAG}": run.paths.full_name, "sagemaker:InstanceTypes": f"ml.{name}"} for name in types
    ]
    tagging = {"sagemaker:TaggingAction": "CreateTrainingJob"}
    job = f"{jobs}/{job_name(run, 'train', 1)}"
    return [
        *(Need(("sagemaker:CreateTrainingJob",), job, of_type) for of_type in context),
        Need(("sagemaker:AddTags",), job, tagging),
        Need(("sagemaker:DescribeTrainingJob",), job),
        Need(("iam:PassRole",), sagemaker_section(run.config).role, {"iam:PassedToService": "sagemaker.amazonaws.com"}),
    ]


def _store_needs(config: RunConfig, given: Account) -> list[Need]:
    store = store_of(config)
    if store is None:
        return []
    return [
        Need(("s3:ListBucket",), _bucket(given, store)),
        Need(("s3:GetObject", "s3:PutObject", "s3:DeleteObject"), _objects(given, store)),
    ]


def _bucket(given: Account, url: str) -> str:
    return f"arn:{given.partition}:s3:::{Location.of(url).bucket}"


def _objects(given: Account, url: str) -> str:
    """The ARN of an object below a URL."""
    return f"{_bucket(given, url)}/{Location.of(url).key('runs/x')}"


def _file_system(given: Account) -> list[Finding]:
    """The file system is Lustre, in the subnets' zone, and reachable from there."""
    subnet = given.subnet()
    if subnet is None:
        return []  # reported by `subnets`
    place = replace(given.place, zone=subnet["AvailabilityZoneId"])
    return storage.file_system(replace(given, place=place))
