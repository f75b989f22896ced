"""Errors of S3 as one line each."""

from contextlib import AbstractContextManager
from typing import Literal

from hyperpod_ft.aws.session import explained

_ACTIONS = {"read": "s3:GetObject", "write": "s3:PutObject", "remove": "s3:DeleteObject"}


def explained_s3(url: str, verb: Literal["read", "write", "remove"]) -> AbstractContextManager[None]:
    """Turn botocore's errors into UserError that say what could not be done with `url`, and what to do."""
    allow = f"grant these credentials s3:ListBucket and {_ACTIONS[verb]}"
    remedies = {
        "NoSuchBucket": "correct the bucket's name",
        "AccessDenied": allow,
        "403": allow,  # of a HEAD request, whose response has no body
        "AllAccessDisabled": allow,
    }
    return explained(f"cannot {verb} {url}", remedies)
