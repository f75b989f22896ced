"""Sessions of AWS Systems Manager with HyperPod nodes, by the AWS CLI: the only access to the nodes.

The CLI passes each session to AWS's session-manager-plugin. Its token stays between the two and never passes here.
"""

import base64
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hyperpod_ft.aws.session import redacted
from hyperpod_ft.errors import UserError, last_line

SSH_DOCUMENT = "AWS-StartSSHSession"  # a tunnel from stdin and stdout to a port of the node
# The agent splits the command of such a document into words and runs it without a shell, as ssm-user, or as the user
# whom the account's RunAs names (StartCommandExecutor in amazon-ssm-agent's agent/session/shell/shell_unix.go). AWS's
# own tools for HyperPod nodes use both: its guide to faulty nodes the first, its easy-ssh.sh the second (July 2026).
COMMAND_DOCUMENTS = ("AWS-StartNonInteractiveCommand", "AmazonEKS-ExecuteNonInteractiveCommand")

_PAGES = {
    "aws": ("the AWS CLI (aws)", "https://docs.aws.amazon.com/cli/latest/userguide/getting-started-install.html"),
    "session-manager-plugin": (
        "AWS's session-manager-plugin",
        "https://docs.aws.amazon.com/systems-manager/latest/userguide/session-manager-working-with-install-plugin.html",
    ),
    "ssh": ("ssh", "OpenSSH's client (Debian, Ubuntu: apt-get install openssh-client)"),
}
# Where AWS's installers put programs: those started from a desktop, such as VS Code, have a short PATH
_USUAL_PLACES = ("/usr/local/bin", "/opt/homebrew/bin", "/usr/local/sessionmanagerplugin/bin")
_NO_CREDENTIALS = re.compile(
    r"ExpiredToken|token (included in the request )?is expired|session .*has expired|Error loading SSO"
    r"|Unable to locate credentials|NoCredentials|InvalidClientTokenId|UnrecognizedClient"
    r"|config profile \(.*?\) could not be found"
)
# Refusals of a session that may be of its document: the target and the credentials are fine
_REFUSED = re.compile(
    r"\((AccessDenied|InvalidDocument|Validation|InvalidParameter|Unsupported)\w*\) when calling the StartSession"
)
_SECONDS = 90  # for a short command on a node; opening the session takes two or three
_GRACE_SECONDS = 2


@dataclass(frozen=True)
class AwsCli:
    """The region and profile for calls of the AWS CLI; without a profile it uses its default credentials.

    `documents`: those that run a command, the one that worked last first.
    """

    region: str
    profile: str | None = None
    documents: list[str] = field(default_factory=lambda: [*COMMAND_DOCUMENTS], init=False, repr=False, compare=False)

    def arguments(self) -> list[str]:
        return ["--region", self.region, *(["--profile", self.profile] if self.profile else [])]


def search_path() -> str:
    """PATH, followed by the directories of AWS's installers."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), *_USUAL_PLACES])


def require(*programs: str) -> None:
    """Raises UserError for the first program that is not installed."""
    for program in programs:
        if shutil.which(program, path=search_path()) is None:
            name, page = _PAGES[program]
            raise UserError(f"{name} is not installed", f"install it: {page}")


def session_command(aws_cli: AwsCli, target: str, document: str = "", **parameters: str) -> list[str]:
    """`aws ssm start-session`, ready to run. Without a document: a shell, as the account's preferences have it."""
    command = ["aws", "ssm", "start-session", *aws_cli.arguments(), "--target", target]
    if document:
        # as JSON: in the CLI's shorthand syntax, commas and equals signs have a meaning
        values = json.dumps({name: [value] for name, value in parameters.items()})
        command += ["--document-name", document, "--parameters", values]
    return command


def shell(aws_cli: AwsCli, target: str) -> int:
    """Open a shell on the node in this terminal, without sshd, keys or /fsx. Returns the CLI's exit status."""
    require("aws", "session-manager-plugin")
    return subprocess.run(session_command(aws_cli, target), env=environment(), check=False).returncode


def script_command(script: Path, *arguments: str) -> str:
    """The command that runs a script of the kit with these arguments: words, as `run` takes them."""
    text = base64.b64encode(script.read_text(encoding="utf-8").encode()).decode()
    return shlex.join(["sh", "-c", f"echo {text} | base64 -d | sh -s -- {shlex.join(arguments)}"])


def run(aws_cli: AwsCli, target: str, command: str, answer: str, attempts: int = 3, seconds: float = _SECONDS) -> str:
    """Run a command on the node (words, without a shell) and return what follows `answer` in the line that has it.

    With the first of AWS's documents for commands that the account and the node accept.

    A session's exit status is not the command's, and sessions occasionally end at once without any output (`Cannot
    perform start session: EOF`). So a command must be safe to run twice, and must print `answer`.
    Raises UserError, also for a command that takes more than `seconds`.
    """
    require("aws", "session-manager-plugin")
    output = ""
    for _ in range(attempts):
        output = _command_output(aws_cli, target, command, seconds)
        if match := re.search(rf"^{re.escape(answer)} (.*?)\r?$", output, re.MULTILINE):
            return match[1]
        if (known := _known(output, target)) is not None:
            raise known
    raise session_error(output, target)


def tunnel(aws_cli: AwsCli, target: str) -> None:
    """Connect stdin and stdout to the node's sshd until either ends. Raises UserError if the session fails."""
    require("aws", "session-manager-plugin")
    command = session_command(aws_cli, target, SSH_DOCUMENT, portNumber="22")
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):  # ssh sends SIGHUP to its ProxyCommand when it ends
        signal.signal(number, lambda *_: sys.exit(0))
    with _session(command, stderr=subprocess.PIPE) as session:
        try:
            _, output = session.communicate()
        except SystemExit:
            _end(session)
            raise
    if session.returncode:
        raise session_error(output, target)


def _command_output(aws_cli: AwsCli, target: str, command: str, seconds: float) -> str:
    """The session's output; where every document is refused, that of one that exists."""
    refusals = []
    for document in (*aws_cli.documents,):
        output = _output_of(session_command(aws_cli, target, document, command=command), target, seconds)
        if not _REFUSED.search(output):
            aws_cli.documents.sort(key=lambda known: known != document)
            return output
        refusals.append(output)
    return next((refusal for refusal in refusals if "InvalidDocument" not in refusal), refusals[0])


def _output_of(command: list[str], target: str, seconds: float) -> str:
    # without a terminal, whose settings the plugin would change, which loses output
    with _session(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as session:
        try:
            output, _ = session.communicate(timeout=seconds)
        except subprocess.TimeoutExpired as error:
            _end(session)
            raise UserError(
                f"{_node(target)}: no answer within {seconds} s; /fsx may hang",
                "connect with `hyperpod-ft cluster ssh --ssm`, which does not need /fsx",
            ) from error
        except BaseException:
            _end(session)
            raise
    return output


def _session(
    command: list[str], stdin: int | None = None, stdout: int | None = None, stderr: int | None = None
) -> "subprocess.Popen[str]":
    # in its own process group: the plugin outlives the CLI
    return subprocess.Popen(
        command,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        text=True,
        errors="replace",
        env=environment(),
        start_new_session=True,
    )


def _end(session: "subprocess.Popen[str]") -> None:
    """End the session: by SIGTERM, on which the plugin closes its session with AWS, then by SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(subprocess.TimeoutExpired):
            session.wait(_GRACE_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(session.pid, number)


def session_error(output: str, target: str) -> UserError:
    """The error for a failed session, from the output of the CLI or the agent."""
    return _known(output, target) or UserError(
        f"{_node(target)}: no session: {_last_message(output) or 'the AWS CLI gave no error message'}",
        "run it again, or connect without ssh: hyperpod-ft cluster ssh --ssm",
    )


def _known(output: str, target: str) -> UserError | None:
    node = _node(target)
    if "SessionManagerPlugin is not found" in output:
        name, page = _PAGES["session-manager-plugin"]
        return UserError(f"{name} is not installed", f"install it: {page}")
    if "TargetNotConnected" in output:
        return UserError(
            f"{node}: its SSM agent is not connected",
            "wait a few minutes if the node is new; otherwise check that the subnet has a route to a NAT gateway, or"
            " replace the node: hyperpod-ft cluster replace-node",
        )
    if user := re.search(r"RunAs user (\S+) does not exist", output):
        return UserError(
            f"{node}: your account's Session Manager logs in as {user[1]} (Run As), a user that the node does not have",
            "clear Run As in Session Manager's preferences, or set it to a user that all nodes have",
        )
    if "please set the RunAs default user" in output:
        return UserError(
            f"{node}: Run As is enabled without a user in your account's Session Manager",
            "set the user in Session Manager's preferences, or disable Run As",
        )
    if _NO_CREDENTIALS.search(output):
        return UserError(
            f"no valid AWS credentials: {_last_message(output)}",
            "log in again, for example with `aws sso login`, run `aws configure`, or set AWS_PROFILE or --profile",
        )
    if "AccessDenied" in output:
        return UserError(
            f"{node}: not allowed to start SSM sessions",
            "allow ssm:StartSession in your policy on the cluster (arn:aws:sagemaker:*:*:cluster/*) and on the"
            f" documents {SSH_DOCUMENT} and {' or '.join(COMMAND_DOCUMENTS)}",
        )
    if "InvalidDocument" in output:
        return UserError(
            f"{node}: SSM has no such document in this region: {_last_message(output)}",
            "use --ssm, which needs no document",
        )
    return None


def _last_message(output: str) -> str:
    """The CLI's last line, except for those that the plugin prints around every session."""
    lines = output.splitlines()
    messages = [line for line in lines if not re.match(r"\s*(Starting|Exiting) session with SessionId", line)]
    return redacted(last_line("\n".join(messages)))


def _node(target: str) -> str:
    """`worker-group-1 i-0123` of a target."""
    return re.sub(r"-(i-[0-9a-f]+)$", r" \1", target.partition("_")[2])


def environment() -> dict[str, str]:
    """This process's environment, with the PATH that `require` searches."""
    return {**os.environ, "PATH": search_path()}
