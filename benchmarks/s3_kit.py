"""The kit's transfers as a command: python -m benchmarks.s3_kit push|pull s3://BUCKET DIRECTORY"""

import sys
from pathlib import Path

from hyperpod_ft.aws.s3 import trees
from hyperpod_ft.aws.session import Session
from hyperpod_ft.digests import files_below

if __name__ == "__main__":
    verb, url, directory = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    client = Session().client("s3")
    if verb == "push":
        trees.push(client, url, directory, files_below(directory))
    else:
        trees.pull(client, url, directory, flush=False)  # as in containers; `measure` does it
