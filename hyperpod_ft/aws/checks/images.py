"""Whether container images exist: those in ECR, of the region where they are to run."""

import re
from collections.abc import Iterable
from typing import Any

from hyperpod_ft.aws.session import error_code
from hyperpod_ft.findings import Finding, error, warning

_ECR_IMAGE = re.compile(r"(\d{12})\.dkr\.ecr\.([a-z0-9-]+)\.amazonaws\.com(?:\.cn)?/([^:@]+):([^@]+)")


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
        try:
            answer = ecr.batch_get_image(
                registryId=parts[1], repositoryName=parts[3], imageIds=[{"imageTag": parts[4]}]
            )
        except ecr.exceptions.ClientError as problem:
            if error_code(problem) != "RepositoryNotFoundException":
                raise
            answer = {"images": []}
        if not answer["images"]:
            findings.append(error(key, f"no image {uri}", f"set {key} to the URI of one that exists"))
    return findings
