"""Whether container images exist: those in ECR, of the region where they are to run."""

import re
from collections.abc import Iterable
from typing import Any

from hyperpod_ft.aws.session import answer_or_none
from hyperpod_ft.findings import Finding, error, warning

_ECR_IMAGE = re.compile(
    r"(\d{12})\.dkr\.ecr\.([a-z0-9-]+)\.amazonaws\.com(?:\.cn)?/([^:@]+)(?::([^@]+))?(?:@(sha256:[0-9a-f]{64}))?"
)
_ABSENT = ("ImageNotFound", "RepositoryNotFound", "RepositoryNotFoundException", "ImageTagDoesNotMatchDigest")


def missing(ecr: Any, region: str, uris: Iterable[str], key: str) -> list[Finding]:
    """An error for each that ECR does not have, a warning for each that is not in ECR there. `key`: names them.

    Raises botocore's errors, for example where these credentials may not look.
    """
    findings = []
    for uri in dict.fromkeys(uris):
        parts = _ECR_IMAGE.fullmatch(uri)
        if parts is None or parts[2] != region:
            problem = f"could not check {uri}: it is not in ECR in {region}"
            findings.append(warning(key, problem, "make sure that SageMaker can pull it"))
            continue
        image = {"imageTag": parts[4]} if parts[4] else {} if parts[5] else {"imageTag": "latest"}
        image |= {"imageDigest": parts[5]} if parts[5] else {}
        found = answer_or_none(
            ecr.batch_get_image, *_ABSENT, registryId=parts[1], repositoryName=parts[3], imageIds=[image]
        )
        answer = found or {"images": []}
        failure = next(iter(answer.get("failures", ())), {"failureCode": _ABSENT[0]})
        if answer["images"]:
            continue
        if failure["failureCode"] in _ABSENT:
            findings.append(error(key, f"no image {uri}", f"set {key} to the URI of one that exists"))
        else:
            why = f"{failure['failureCode']} {failure.get('failureReason', '')}".rstrip()
            findings.append(warning(key, f"could not check {uri}: {why}", "make sure that SageMaker can pull it"))
    return findings
