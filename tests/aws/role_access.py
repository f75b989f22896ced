"""What a role's credentials may do, by its policies and a bucket's. moto, which ignores conditions, sees neither.

Requests that such credentials sign are evaluated: those of nodes (AssumeRole) and of training jobs' containers. Any
others may do everything.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any
from urllib.parse import parse_qs

from moto.sts.models import sts_backends

from tests.aws.permissions import evaluate, role_statements
from tests.aws.wire import AwsError, Call
from tests.aws.world import ACCOUNT, Region

_ACTIONS = {"GET": "s3:GetObject", "HEAD": "s3:GetObject", "PUT": "s3:PutObject", "POST": "s3:PutObject"}
_CREDENTIALS = "/_credentials/"
_SESSION_SECONDS = 3600
Asked = tuple[str, str, dict[str, list[str]]]  # action, resource, context of the request


def refusal(region: Region, call: Call, environ: dict[str, Any], body: Callable[[], bytes]) -> AwsError | None:
    """AccessDenied for what the role that signed a call may not do; None for what it may, and for other callers."""
    session = sts_backends[ACCOUNT]["aws"].get_assumed_role_from_access_key(call.access_key)
    if session is None:
        return None
    asked = _asked_of_s3(environ, body) if call.service == "s3" else _asked(call)
    for action, resource, context in asked:
        if not may(region, session.role_arn, action, resource, context):
            message = f"User: {session.arn} is not authorized to perform: {action} on resource: {resource}"
            return AwsError("AccessDenied" if call.service == "s3" else "AccessDeniedException", message, 403)
    return None


def may(
    region: Region, role: str, action: str, resource: str, context: Mapping[str, list[str]] = MappingProxyType({})
) -> bool:
    """Whether a role may do this. `context`: condition keys of the request, besides those of every request."""
    bucket = resource.removeprefix("arn:aws:s3:::").partition("/")[0]
    statements = [*role_statements(role.rpartition("/")[2]), *region.world.bucket_policies.get(bucket, [])]
    always = {
        "aws:PrincipalArn": [role],
        "aws:PrincipalAccount": [ACCOUNT],
        "aws:ResourceAccount": [ACCOUNT],
        "aws:SecureTransport": ["true"],  # plain HTTP on the loopback interface stands for TLS
    }
    return evaluate(statements, action, resource, {**always, **context})[0]


def credentials_path(job: str) -> str:
    """Where the containers of a training job get the credentials of their role, as AWS's SDKs ask for them."""
    return _CREDENTIALS + job


def credentials(regions: dict[str, Region], path: str) -> dict[str, str] | None:
    """The answer at such a path: a new session of the job's role; None at any other."""
    name = path.removeprefix(_CREDENTIALS)
    job = next((one.training_jobs[name] for one in regions.values() if name in one.training_jobs), None)
    if job is None:
        return None
    session = sts_backends[ACCOUNT]["aws"].assume_role(
        region_name=job.region.name,
        role_session_name="SageMaker",
        role_arn=job.request["RoleArn"],
        policy="",
        duration=_SESSION_SECONDS,
        external_id="",
    )
    return {
        "RoleArn": session.role_arn,
        "AccessKeyId": session.access_key_id,
        "SecretAccessKey": session.secret_access_key,
        "Token": session.session_token,
        "Expiration": session.expiration.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def types_of(resources: dict[str, Any]) -> list[str]:
    """The instance types that a job may have, or has: of a ResourceConfig."""
    chosen = resources.get("SelectedInstanceType") or resources.get("InstanceType")
    return [chosen] if chosen else [one["InstanceType"] for one in resources["InstancePreferences"]]


def _asked(call: Call) -> Iterator[Asked]:
    """What one request to any service but S3 needs. Of resources, those of training jobs are known."""
    action = f"{call.service}:{call.operation}"
    if call.service != "sagemaker" or "TrainingJob" not in call.operation:
        yield action, "*", {}
        return
    request = call.parameters()
    job = f"arn:aws:sagemaker:{call.region}:{ACCOUNT}:training-job/{request.get('TrainingJobName', '').lower()}"
    if call.operation != "CreateTrainingJob":
        yield action, job if "TrainingJobName" in request else "*", {}
        return
    tags = {tag["Key"]: tag["Value"] for tag in request.get("Tags", [])}
    context = {
        "sagemaker:InstanceTypes": types_of(request["ResourceConfig"]),
        "aws:TagKeys": list(tags),
        **{f"aws:RequestTag/{key}": [value] for key, value in tags.items()},
    }
    yield action, job, context
    if tags:
        yield "sagemaker:AddTags", job, context | {"sagemaker:TaggingAction": ["CreateTrainingJob"]}
    yield "iam:PassRole", request["RoleArn"], {"iam:PassedToService": ["sagemaker.amazonaws.com"]}


def _asked_of_s3(environ: dict[str, Any], body: Callable[[], bytes]) -> Iterator[Asked]:
    """The same of one request to S3, whose path is /BUCKET/KEY."""
    bucket, _, key = environ["PATH_INFO"].removeprefix("/").partition("/")
    method, query = environ["REQUEST_METHOD"], parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)
    arn = f"arn:aws:s3:::{bucket}"
    if method == "POST" and "delete" in query:
        for found in re.findall(r"<Key>(.*?)</Key>", body().decode()):
            yield "s3:DeleteObject", f"{arn}/{found}", {}
    elif not key:
        yield "s3:ListBucket", arn, {}
    elif method == "DELETE":
        yield ("s3:AbortMultipartUpload" if "uploadId" in query else "s3:DeleteObject"), f"{arn}/{key}", {}
    else:
        yield _ACTIONS[method], f"{arn}/{key}", {}
