"""Single small objects: their content, writing them, removing them. Names are relative to `url`, as in trees.py."""

from collections.abc import Iterable
from typing import Any

from hyperpod_ft.aws.s3.errors import explained_s3
from hyperpod_ft.aws.s3.location import Location
from hyperpod_ft.aws.session import error_code

_MAX_KEYS = 1000  # of one DeleteObjects


def read(client: Any, url: str, name: str) -> bytes | None:
    """The content of an object, or None if it does not exist."""
    from botocore.exceptions import ClientError  # noqa: PLC0415 - boto3 belongs to an extra

    location = Location.of(url)
    with explained_s3(url, "read"):
        try:
            content: bytes = client.get_object(Bucket=location.bucket, Key=location.key(name))["Body"].read()
        except ClientError as error:
            if error_code(error) == "NoSuchKey":
                return None
            raise
    return content


def write(client: Any, url: str, name: str, content: bytes) -> None:
    location = Location.of(url)
    with explained_s3(url, "write"):
        client.put_object(Bucket=location.bucket, Key=location.key(name), Body=content)


def remove(client: Any, url: str, names: Iterable[str]) -> None:
    """Remove objects, those that exist."""
    location = Location.of(url)
    keys = [{"Key": location.key(name)} for name in names]
    with explained_s3(url, "remove"):
        for begin in range(0, len(keys), _MAX_KEYS):
            client.delete_objects(
                Bucket=location.bucket, Delete={"Objects": keys[begin : begin + _MAX_KEYS], "Quiet": True}
            )
