"""S3's answer to a node: the role's policies and the bucket's decide. moto, which ignores conditions, sees neither.

Requests that a role's credentials sign (AssumeRole) are evaluated; any others may do everything.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs

from moto.sts.models import sts_backends

from tests.aws.permissions import evaluate, role_statements
from tests.aws.wire import AwsError
from tests.aws.world import ACCOUNT, Region

_ACTIONS = {"GET": "s3:GetObject", "HEAD": "s3:GetObject", "PUT": "s3:PutObject", "POST": "s3:PutObject"}


def refusal(region: Region, access_key: str, environ: dict[str, Any], body: Callable[[], bytes]) -> AwsError | None:
    """AccessDenied for what the role of this access key may not do; None for what it may, and for other callers."""
    session = sts_backends[ACCOUNT]["aws"].get_assumed_role_from_access_key(access_key)
    if session is None:
        return None
    bucket = environ["PATH_INFO"].split("/")[1]
    statements = [
        *role_statements(region.client("iam"), session.role_arn.rpartition("/")[2]),
        *region.world.bucket_policies.get(bucket, []),
    ]
    context = {
        "aws:PrincipalArn": [session.role_arn],
        "aws:PrincipalAccount": [ACCOUNT],
        "aws:ResourceAccount": [ACCOUNT],
        "aws:SecureTransport": ["true"],  # plain HTTP on the loopback interface stands for TLS
    }
    for action, resource in _asked(environ, body):
        if not evaluate(statements, action, resource, context)[0]:
            return AwsError("AccessDenied", f"{session.role_arn} is not authorized to perform: {action}", 403)
    return None


def _asked(environ: dict[str, Any], body: Callable[[], bytes]) -> Iterator[tuple[str, str]]:
    """Actions and resources of one request, whose path is /BUCKET/KEY."""
    bucket, _, key = environ["PATH_INFO"].removeprefix("/").partition("/")
    method, query = environ["REQUEST_METHOD"], parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)
    arn = f"arn:aws:s3:::{bucket}"
    if method == "POST" and "delete" in query:
        yield from (("s3:DeleteObject", f"{arn}/{found}") for found in re.findall(r"<Key>(.*?)</Key>", body().decode()))
    elif not key:
        yield "s3:ListBucket", arn
    elif method == "DELETE":
        yield ("s3:AbortMultipartUpload" if "uploadId" in query else "s3:DeleteObject"), f"{arn}/{key}"
    else:
        yield _ACTIONS[method], f"{arn}/{key}"
