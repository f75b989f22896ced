"""A short-lived token with which OpenAI clients reach an endpoint of SageMaker.

It is `sagemaker-api-key-` and, in base64, a presigned request (`POST sagemaker.amazonaws.com/?Action=
CallWithBearerToken`), as AWS's own token generator makes it: nothing is sent, and the caller's credentials sign it. It
ends after at most 12 hours, or with temporary credentials.
"""

import base64
from typing import Any

from hyperpod_ft.errors import UserError

MAX_SECONDS = 12 * 3600
_PREFIX = "sagemaker-api-key-"


def base_url(runtime_url: str, endpoint: str, component: str | None = None) -> str:
    """The base URL for OpenAI clients.

    `runtime_url`: of SageMaker's runtime in the region, as boto3's client has it. `component`: the inference component
    of an endpoint that scales to zero.
    """
    middle = f"/inference-components/{component}" if component else ""
    return f"{runtime_url}/endpoints/{endpoint}{middle}/openai/v1"


def bearer_token(credentials: Any, region: str, seconds: int = MAX_SECONDS) -> str:
    """`credentials` are botocore's, or None when it found none: then UserError is raised."""
    from botocore.auth import SigV4QueryAuth  # noqa: PLC0415 - only this command
    from botocore.awsrequest import AWSRequest  # noqa: PLC0415 - as above

    if credentials is None:
        raise UserError("no AWS credentials", "set AWS_PROFILE, or attach a role to this machine")
    request = AWSRequest(
        method="POST",
        url="https://sagemaker.amazonaws.com/",
        headers={"host": "sagemaker.amazonaws.com"},
        params={"Action": "CallWithBearerToken"},
    )
    SigV4QueryAuth(credentials, "sagemaker", region, expires=seconds).add_auth(request)
    signed = f"{request.url.removeprefix('https://')}&Version=1"
    return _PREFIX + base64.b64encode(signed.encode()).decode()
