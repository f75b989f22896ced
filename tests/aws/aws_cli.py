"""A stand-in for the AWS CLI with its session-manager-plugin, for tests of `cluster ssh`.

    python -m tests.aws.aws_cli ssm start-session ...

What is real: boto3 sends each call to the server that stands in for AWS, which knows the targets.
What stands in for SSM's service, agent and tunnel: $NODES/<instance id>/ is the node. A tunnel is that node's own sshd
(`sshd -i`), run on this process's stdin and stdout; a command is split into words and run without a shell, as the agent
does, on this machine, where the node's bin/ comes first in PATH. $NODES/sessions lists sessions: document, target.
Each file $NODES/<instance id>/fails/<n>, in the order of their names, is printed once by a session that then fails.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import boto3
from botocore.exceptions import ClientError

NODES = Path(os.environ["NODES"])


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("service", choices=["ssm"])
    parser.add_argument("operation", choices=["start-session"])
    for option in ("region", "profile", "target", "document-name", "parameters"):
        parser.add_argument(f"--{option}")
    given = parser.parse_args()
    try:
        client = boto3.Session(profile_name=given.profile, region_name=given.region).client("ssm")
        return start_session(client, given)
    except ClientError as error:
        print(f"\n{error}", file=sys.stderr)
        return 254


def start_session(client: Any, given: argparse.Namespace) -> int:
    parameters = json.loads(given.parameters or "{}")
    more = {"DocumentName": given.document_name, "Parameters": parameters} if given.document_name else {}
    client.start_session(Target=given.target, **more)
    with (NODES / "sessions").open("a") as log:
        log.write(f"{given.document_name or 'shell'} {given.target}\n")
    node = NODES / ("i-" + given.target.rpartition("-i-")[2])
    fails = sorted((node / "fails").glob("*"))
    if fails:
        print(f"\nStarting session with SessionId: stand-in\n{fails[0].read_text()}")
        fails[0].unlink()
        return 0
    sys.stdout.flush()
    match given.document_name:
        case None:
            print(f"a shell on {node.name}")
        case "AWS-StartSSHSession":
            assert parameters == {"portNumber": ["22"]}
            # a child of the CLI, like the plugin: ending one does not end the other
            return subprocess.run(["sh", str(node / "sshd")], check=False).returncode
        case "AWS-StartNonInteractiveCommand":
            print("\nStarting session with SessionId: stand-in", flush=True)
            environment = {**os.environ, "PATH": f"{node / 'bin'}:{os.environ['PATH']}"}
            words = shlex.split(parameters["command"][0])
            subprocess.run(words, env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, check=False)
            print("\n\nExiting session with sessionId: stand-in.\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
