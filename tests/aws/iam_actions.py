"""The permission that a request needs, as IAM names it."""

from typing import Any
from urllib.parse import parse_qs

from tests.aws.wire import Call

_PREFIXES = {"service-quotas": "servicequotas"}
_BUCKET = {
    "GET": {"versions": "ListBucketVersions", "location": "GetBucketLocation", "": "ListBucket"},
    "HEAD": {"": "ListBucket"},
    "POST": {"delete": "DeleteObject"},
    "PUT": {
        "policy": "PutBucketPolicy",
        "publicAccessBlock": "PutBucketPublicAccessBlock",
        "tagging": "PutBucketTagging",
        "versioning": "PutBucketVersioning",
        "": "CreateBucket",
    },
    "DELETE": {"policy": "DeleteBucketPolicy", "": "DeleteBucket"},
}
_OBJECT = {
    "GET": {"": "GetObject"},
    "HEAD": {"": "GetObject"},
    "PUT": {"": "PutObject"},
    "POST": {"": "PutObject"},
    "DELETE": {"uploadId": "AbortMultipartUpload", "": "DeleteObject"},
}


def iam_action(call: Call, environ: dict[str, Any]) -> str:
    if call.service != "s3":
        return f"{_PREFIXES.get(call.service, call.service)}:{call.operation}"
    bucket_and_key = environ["PATH_INFO"].strip("/")
    asked = parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)
    names = (_OBJECT if "/" in bucket_and_key else _BUCKET)[call.operation]
    return "s3:" + next((name for key, name in names.items() if key in asked), names.get("", call.operation))
