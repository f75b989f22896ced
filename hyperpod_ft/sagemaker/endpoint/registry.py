"""A tuned model in SageMaker's Model Registry: a version of a model package group, with what the model was made of and
its scores. It has its own copy of the files, since an endpoint's and a run's may be deleted."""

import copy
import json
import re
from dataclasses import dataclass
from typing import Any

from hyperpod_ft import __version__
from hyperpod_ft.aws.checks.service_model import check_request
from hyperpod_ft.digests import text_sha256
from hyperpod_ft.errors import UserError
from hyperpod_ft.progress import PrintLine
from hyperpod_ft.runs import chain
from hyperpod_ft.runs.results.evaluation import evaluations
from hyperpod_ft.runs.run import Run
from hyperpod_ft.sagemaker.endpoint.creation import check_bucket, place
from hyperpod_ft.sagemaker.endpoint.deployment import Deployment, bundle_prefix
from hyperpod_ft.sagemaker.section import RUN_TAG, slug

_MAX_GROUP_LENGTH = 63
_MAX_SCORES = 40  # a model package has 50 properties


@dataclass(frozen=True)
class Registration:
    """The requests of `deploy register`, and the S3 prefix of its copy of the model, without a slash at its end."""

    group: dict[str, Any]
    package: dict[str, Any]
    files: str

    @property
    def name(self) -> str:
        return str(self.group["ModelPackageGroupName"])

    def in_order(self) -> list[tuple[str, dict[str, Any]]]:
        """Operations of SageMaker and their requests."""
        return [("CreateModelPackageGroup", self.group), ("CreateModelPackage", self.package)]


def registration(planned: Deployment, group: str | None) -> Registration:
    """`group`: the model package group; None: named after the run. Raises UserError for what AWS would refuse."""
    run, properties = planned.run, _properties(planned.run)
    name = group or slug(run.config, _MAX_GROUP_LENGTH)
    container = copy.deepcopy(planned.requests.model["PrimaryContainer"])
    content = text_sha256(json.dumps([planned.target.bundle.version, container, properties]))[:12]
    files = f"{bundle_prefix(run, 'registry')}{content}"
    container["ModelDataSource"]["S3DataSource"]["S3Uri"] = f"{files}/"
    package = {
        "ModelPackageGroupName": name,
        "ModelPackageDescription": f"Run {run.paths.full_name}, content {content}",  # by which it is found again
        "ModelApprovalStatus": "PendingManualApproval",
        "InferenceSpecification": {
            "Containers": [container],
            "SupportedRealtimeInferenceInstanceTypes": [f"ml.{planned.target.settings.instance_type}"],
            "SupportedContentTypes": ["application/json"],
            "SupportedResponseMIMETypes": ["application/json"],
        },
        "CustomerMetadataProperties": properties,
    }
    tags = [{"Key": RUN_TAG, "Value": planned.target.run}]
    made = Registration({"ModelPackageGroupName": name, "Tags": tags}, package, files)
    for operation, request in made.in_order():
        for violation in check_request("sagemaker", operation, request):
            raise UserError(f"{operation}: {violation.path}: {violation.problem}", "correct section deploy or --group")
    return made


def register(sagemaker: Any, s3: Any, planned: Deployment, made: Registration, report: PrintLine) -> str:
    """The ARN of the model package, which may exist already. `sagemaker` and `s3` are boto3's clients."""
    groups = sagemaker.get_paginator("list_model_package_groups").paginate(NameContains=made.name)
    names = {one["ModelPackageGroupName"] for page in groups for one in page["ModelPackageGroupSummaryList"]}
    if made.name in names:
        packages = sagemaker.get_paginator("list_model_packages").paginate(ModelPackageGroupName=made.name)
        for one in (summary for page in packages for summary in page["ModelPackageSummaryList"]):
            if one.get("ModelPackageDescription") == made.package["ModelPackageDescription"]:
                report(f"the model is in group {made.name} already")
                return str(one["ModelPackageArn"])
    check_bucket(s3, made.files, planned.target.region)
    place(s3, planned.run, planned.target.bundle, made.files, report)
    if made.name not in names:
        sagemaker.create_model_package_group(**made.group)
    return str(sagemaker.create_model_package(**made.package)["ModelPackageArn"])


def _properties(run: Run) -> dict[str, str]:
    """What the model was made of, and its scores beside those of its base."""
    config = run.config
    properties = {
        "run": run.paths.full_name,
        "made by": f"hyperpod-ft {__version__}",
        "base model": config.model.asset.pinned,
        "dataset": " ".join(dict.fromkeys(part.dataset.asset.pinned for part in config.dataset.parts)),
        "objective": f"{config.training.objective} {config.training.method}",
        "digest of the model": chain.model_digest(run.journal),
    }
    scores = [
        (evaluation.label(score.metric), f"{score.tuned.value:.4f} base {score.base.value:.4f}")
        for evaluation in evaluations(run)
        for score in evaluation.main_scores
        if score.tuned.value is not None and score.base.value is not None
    ]
    return {_plain(key): _plain(value) for key, value in (*properties.items(), *scores[:_MAX_SCORES])}


def _plain(text: str) -> str:
    """In the characters that a property may have."""
    return re.sub(r"[^\w.:/=+@-]+", " ", text).strip()[:128]
