"""A bundle in S3: each file an object, never an archive, which SageMaker would have to unpack."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hyperpod_ft.errors import UserError

_MOST_DELETED = 1000  # DeleteObjects


def push(client: Any, url: str, root: Path, files: Iterable[Path]) -> None:
    """Upload files below `root` as objects below `url`; those that are there with the same size are left alone."""
    bucket, prefix = split(url)
    for file in files:
        key = f"{prefix}{file.relative_to(root).as_posix()}"
        if _size(client, bucket, key) != file.stat().st_size:
            client.upload_file(str(file), bucket, key)


def _size(client: Any, bucket: str, key: str) -> int | None:
    found = client.list_objects_v2(Bucket=bucket, Prefix=key, MaxKeys=1).get("Contents", [])
    return next((entry["Size"] for entry in found if entry["Key"] == key), None)


def remove(client: Any, url: str) -> int:
    """Delete every object below a prefix; returns how many. A bucket that does not exist has none."""
    bucket, prefix = split(url)
    removed = 0
    try:
        # always the first thousand: a marker could skip objects that are written meanwhile
        while keys := [
            {"Key": entry["Key"]}
            for entry in client.list_objects_v2(Bucket=bucket, Prefix=prefix, MaxKeys=_MOST_DELETED).get("Contents", [])
        ]:
            answer = client.delete_objects(Bucket=bucket, Delete={"Objects": keys, "Quiet": True})
            for failed in answer.get("Errors", []):
                raise UserError(
                    f"s3://{bucket}/{failed['Key']} cannot be deleted ({failed['Code']})",
                    "allow s3:DeleteObject to these credentials",
                )
            removed += len(keys)
    except client.exceptions.NoSuchBucket:
        return removed
    return removed


def split(url: str) -> tuple[str, str]:
    """Bucket, and key prefix with a slash at its end."""
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    return bucket, f"{prefix.rstrip('/')}/" if prefix else ""
