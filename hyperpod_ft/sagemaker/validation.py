"""`hyperpod-ft sagemaker validate`: can this run become training jobs? Offline first, then in the account."""

import time
from collections.abc import Callable, Iterable
from functools import partial

from hyperpod_ft.aws.checks.account import Account, ValidationResult, run_checks
from hyperpod_ft.aws.checks.service_model import check_request, known_regions
from hyperpod_ft.aws.session import Session
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.errors import UserError
from hyperpod_ft.findings import Finding, error, warning
from hyperpod_ft.runs.run import Run
from hyperpod_ft.sagemaker.account_checks import SERVICES, account_checks, place_of
from hyperpod_ft.sagemaker.groups import NO_MAIL, StageGroup, groups, job_name, sagemaker_section
from hyperpod_ft.sagemaker.training_request import create_training_job


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


def client_of(config: RunConfig, profile: str | None) -> Callable[[str], object]:
    """boto3's clients in the region of the run's section."""
    return Session(sagemaker_section(config).region, profile).client


def _offline(run: Run) -> Iterable[Finding]:
    section = sagemaker_section(run.config)
    if section.region not in known_regions("sagemaker"):
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
