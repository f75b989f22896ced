"""A stand-in for the AWS CLI with its session-manager-plugin, for tests of `cluster ssh`.

    python -m tests.aws.aws_cli ssm start-session ...

Each call is sent to the server that stands in for AWS, which knows the targets; not by boto3, whose import takes half a
second.
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
import urllib.error
import urllib.request
from pathlib import Path

NODES = Path(os.environ["NODES"])


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("service", choices=["ssm"])
    parser.add_argument("operation", choices=["start-session"])
    for option in ("region", "profile", "target", "document-name", "parameters"):
        parser.add_argument(f"--{option}")
    given = parser.parse_args()
    parameters = json.loads(given.parameters or "{}")
    more = {"DocumentName": given.document_name, "Parameters": parameters} if given.document_name else {}
    try:
        ask({"Target": given.target, **more}, given.region)
    except urllib.error.HTTPError as error:
        found = json.load(error)
        print(
            f"\nAn error occurred ({found['__type']}) when calling the StartSession operation: {found['message']}",
            file=sys.stderr,
        )
        return 254
    return start_session(given, parameters)


def ask(request: dict[str, object], region: str) -> None:
    credential = f"{os.environ['AWS_ACCESS_KEY_ID']}/20260101/{region}/ssm/aws4_request"
    headers = {
        "X-Amz-Target": "AmazonSSM.StartSession",
        "Content-Type": "application/x-amz-json-1.1",
        "Authorization": f"AWS4-HMAC-SHA256 Credential={credential}, SignedHeaders=host, Signature=0",
    }
    asked = urllib.request.Request(os.environ["AWS_ENDPOINT_URL"], json.dumps(request).encode(), headers)
    with urllib.request.urlopen(asked, timeout=300):
        pass


def start_session(given: argparse.Namespace, parameters: dict[str, list[str]]) -> int:
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
        case "AWS-StartNonInteractiveCommand" | "AmazonEKS-ExecuteNonInteractiveCommand":
            print("\nStarting session with SessionId: stand-in", flush=True)
            environment = {**os.environ, "PATH": f"{node / 'bin'}:{os.environ['PATH']}"}
            words = shlex.split(parameters["command"][0])
            subprocess.run(words, env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, check=False)
            print("\n\nExiting session with sessionId: stand-in.\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
