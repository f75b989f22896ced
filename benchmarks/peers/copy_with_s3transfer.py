"""s3transfer, what boto3 transfers with, as it comes: python copy_with_s3transfer.py push|pull s3://BUCKET DIRECTORY"""

import sys
from pathlib import Path

from botocore.session import Session
from s3transfer.manager import TransferManager

if __name__ == "__main__":
    verb, url, directory = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    client, bucket = Session().create_client("s3"), url.removeprefix("s3://")
    with TransferManager(client) as manager:
        started = []
        if verb == "push":
            for file in directory.rglob("*"):
                if file.is_file():
                    started.append(manager.upload(str(file), bucket, file.relative_to(directory).as_posix()))
        else:
            for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket):
                for found in page["Contents"]:
                    target = directory / found["Key"]
                    target.parent.mkdir(parents=True, exist_ok=True)
                    started.append(manager.download(bucket, found["Key"], str(target)))
        for one in started:
            one.result()
