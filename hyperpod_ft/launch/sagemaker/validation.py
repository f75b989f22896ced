"""`hyperpod-ft sagemaker validate`: can this run become training jobs? Offline first, then in the account.

Most checks are those of clusters (aws/validation): they look at a role, a bucket, a subnet, a file system. They are
given the run's as if a cluster used them, and their findings are renamed to the run file's keys.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from hyperpod_ft.aws.session import Session
from hyperpod_ft.aws.validation import (
    capacity_checks,
    filesystem_checks,
    network_checks,
    permission_checks,
    state_checks,
)
from hyperpod_ft.aws.validation.check_input import SERVICES
from hyperpod_ft.aws.validation.regions import known
from hyperpod_ft.aws.validation.service_model import check_request
from hyperpod_ft.aws.validation.validate import ValidationResult, run_checks
from hyperpod_ft.config.cluster_config import ClusterConfig
from hyperpod_ft.errors import UserError
from hyperpod_ft.findings import Finding, error, warning
from hyperpod_ft.launch.sagemaker.account_checks import account_checks
from hyperpod_ft.launch.sagemaker.groups import NO_MAIL, StageGroup, groups, job_name, sagemaker_section
from hyperpod_ft.launch.sagemaker.training_request import create_training_job
from hyperpod_ft.runs.run import Run

_KEYS = {
    network_checks.SUBNET: "sagemaker.file_system.subnets",
    network_checks.GROUPS: "sagemaker.file_system.security_groups",
    filesystem_checks.FSX: "sagemaker.file_system.id",
    permission_checks.ROLE: "sagemaker.role",
    state_checks.BUCKET: "sagemaker.store",
    "workers.0.training_plan_arn": "sagemaker.training_plan",
    "workers.0.instance_type": "cluster.instance_type",
    "workers.0.count": "cluster.nodes",
}


def validate(run: Run, client: Callable[[str], object] | None) -> ValidationResult:
    """Every check; changes nothing. `client`: boto3's for a service in the run's region; None: only offline checks.

    Raises UserError without a section sagemaker, or when boto3 is missing.
    """
    began = time.monotonic()
    found = dict.fromkeys(_offline(run))  # jobs may share a problem
    offline = ValidationResult(tuple(found), ("requests", "region", "images"), (), time.monotonic() - began)
    if client is None or offline.has_errors:
        return offline
    checks = account_checks(run)
    return offline + _renamed(run, run_checks(_as_cluster(run), checks, client, set(), (*SERVICES, "ecr")))


def client_of(run: Run, profile: str | None) -> Callable[[str], object]:
    """boto3's clients in the region of the run's section."""
    return Session(sagemaker_section(run).region, profile).client


def _offline(run: Run) -> Iterable[Finding]:
    section = sagemaker_section(run)
    if section.region not in known("sagemaker"):
        yield error("sagemaker.region", f"SageMaker is not offered in {section.region}", "set another region")
    if run.config.cluster.mail_user:
        yield warning("cluster.mail_user", NO_MAIL, "an EventBridge rule can do that (docs/training-jobs.md)")
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


def _as_cluster(run: Run) -> ClusterConfig:
    """A cluster file with the run's role, bucket, network and file system, for the checks of clusters.

    Placeholder ids stand for what the run lacks; no check reads them.
    """
    section, mounted = sagemaker_section(run), sagemaker_section(run).file_system
    training = next(group for group in groups(run.plan.stages) if group.starts_ranks)
    return ClusterConfig.model_validate(
        {
            "name": "training-jobs",
            "region": section.region,
            "availability_zone_id": "none1-az1",
            "workers": [
                {
                    "name": "training",
                    "instance_type": f"ml.{training.instance_type(run)}",
                    "count": training.nodes,
                    "training_plan_arn": section.training_plan,
                }
            ],
            "existing": {
                "subnet_id": mounted.subnets[0] if mounted else "subnet-00000000",
                "security_group_ids": mounted.security_groups if mounted else ["sg-00000000"],
                "execution_role_arn": section.role,
                "bucket": section.output_path.removeprefix("s3://").partition("/")[0],
                "fsx_id": mounted.id if mounted else "fs-00000000",
            },
        }
    )


def _renamed(run: Run, result: ValidationResult) -> ValidationResult:
    """The findings under the run file's keys, without those about the availability zone, which a training job lacks."""
    keys = _KEYS if run.config.store else {**_KEYS, state_checks.BUCKET: "sagemaker.output"}
    findings = [
        replace(finding, name=keys.get(finding.name, finding.name))
        for finding in result.findings
        if finding.name != capacity_checks.ZONE
    ]
    return replace(result, findings=tuple(findings))
