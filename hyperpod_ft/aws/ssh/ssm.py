"""Sessions of AWS Systems Manager with HyperPod nodes, by the AWS CLI: nodes have no other way in.

The CLI hands each session to AWS's session-manager-plugin. Tokens stay between the two: neither passes through here.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass

from hyperpod_ft.aws.session import redacted
from hyperpod_ft.errors import UserError

SSH_DOCUMENT = "AWS-StartSSHSession"  # a tunnel from stdin and stdout to a port of the node
# The agent splits this document's command into words and runs it without a shell, as ssm-user, or as the user whom the
# account's RunAs names (StartCommandExecutor in amazon-ssm-agent's agent/session/shell/shell_unix.go)
COMMAND_DOCUMENT = "AWS-StartNonInteractiveCommand"

_PAGES = {
    "aws": (
        "the AWS CLI (aws)",
        "https://docs.aws.amazon.com/cli/latest/userguide/getting-started-install.html",
    ),
    "session-manager-plugin": (
        "AWS's session-manager-plugin",
        "https://docs.aws.amazon.com/systems-manager/latest/userguide/session-manager-working-with-install-plugin.html",
    ),
    "ssh": ("ssh", "OpenSSH's client (Debian, Ubuntu: apt-get install openssh-client)"),
}
# Programs that start from a desktop, as VS Code does, have a short PATH: where AWS's installers put things
_USUAL_PLACES = ("/usr/local/bin", "/opt/homebrew/bin", "/usr/local/sessionmanagerplugin/bin")
_SECONDS = 90  # for a command on a node; opening the session takes two or three
_GRACE_SECONDS = 2


@dataclass(frozen=True)
class AwsCli:
    """With which region and profile the AWS CLI is called; no profile: whatever credentials it finds by itself."""

    region: str
    profile: str | None = None

    def arguments(self) -> list[str]:
        return ["--region", self.region, *(["--profile", self.profile] if self.profile else [])]


def search_path() -> str:
    """PATH, and after it where AWS's installers put their programs."""
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
        # as JSON: the CLI's short form gives commas and equals signs in values a meaning
        values = json.dumps({name: [value] for name, value in parameters.items()})
        command += ["--document-name", document, "--parameters", values]
    return command


def shell(aws_cli: AwsCli, target: str) -> int:
    """A shell on the node in this terminal, without sshd, keys or /fsx. Returns the CLI's exit status."""
    require("aws", "session-manager-plugin")
    return subprocess.run(session_command(aws_cli, target), env=environment(), check=False).returncode


def run(aws_cli: AwsCli, target: str, command: str, answer: str, attempts: int = 3) -> str:
    """Run words on the node (no shell, as the document's) and return what follows `answer` in the line that has it.

    The exit status of a session says nothing of the command's, and sessions now and then end at once without any
    output (`Cannot perform start session: EOF`): so commands are to be such as may run twice, and to say `answer`.
    Raises UserError.
    """
    require("aws", "session-manager-plugin")
    said = ""
    for _ in range(attempts):
        said = _said(session_command(aws_cli, target, COMMAND_DOCUMENT, command=command), target)
        if match := re.search(rf"^{re.escape(answer)} (.*?)\r?$", said, re.MULTILINE):
            return match[1]
        if (known := _known(said, target)) is not None:
            raise known
    raise explained(said, target)


def tunnel(aws_cli: AwsCli, target: str) -> None:
    """Join stdin and stdout to the node's sshd until either ends. Raises UserError when there is no session."""
    require("aws", "session-manager-plugin")
    command = session_command(aws_cli, target, SSH_DOCUMENT, portNumber="22")
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):  # ssh ends, and hangs up on its ProxyCommand
        signal.signal(number, lambda *_: sys.exit(0))
    with _session(command, stderr=subprocess.PIPE) as session:
        try:
            _, said = session.communicate()
        except SystemExit:
            _end(session)
            raise
    if session.returncode:
        raise explained(said, target)


def _said(command: list[str], target: str) -> str:
    # without a terminal: given one, the plugin changes its settings, and output gets lost
    with _session(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as session:
        try:
            said, _ = session.communicate(timeout=_SECONDS)
        except subprocess.TimeoutExpired as error:
            _end(session)
            raise UserError(
                f"{_node(target)}: no answer within {_SECONDS} s; its /fsx may hang",
                "look with --ssm, which needs no /fsx",
            ) from error
        except BaseException:
            _end(session)
            raise
    return said


def _session(
    command: list[str], stdin: int | None = None, stdout: int | None = None, stderr: int | None = None
) -> "subprocess.Popen[str]":
    # a process group of its own: the CLI does not take the plugin with it when it ends
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
    """Whatever it takes; gently first: the plugin closes its session with AWS when its input ends, or when asked to."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(subprocess.TimeoutExpired):
            session.wait(_GRACE_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(session.pid, number)


def explained(said: str, target: str) -> UserError:
    """What the CLI or the agent says of a session that failed, and what to do about it."""
    return _known(said, target) or UserError(
        f"{_node(target)}: no session: {_last_words(said) or 'the AWS CLI said nothing'}",
        "try again; without ssh: --ssm",
    )


def _known(said: str, target: str) -> UserError | None:
    node = _node(target)
    if "SessionManagerPlugin is not found" in said:
        name, page = _PAGES["session-manager-plugin"]
        return UserError(f"{name} is not installed", f"install it: {page}")
    if "TargetNotConnected" in said:
        return UserError(
            f"{node}: its SSM agent is not connected",
            "a node that has just started needs some minutes; otherwise the subnet may lack a route out (NAT), or the"
            " node hangs: hyperpod-ft cluster replace-node",
        )
    if user := re.search(r"RunAs user (\S+) does not exist", said):
        return UserError(
            f"{node}: your account's Session Manager logs in as {user[1]} (RunAs), a user the node does not have",
            "clear Run As in Session Manager's preferences, or name a user there that all nodes have",
        )
    if "please set the RunAs default user" in said:
        return UserError(
            f"{node}: your account's Session Manager has Run As switched on without a user",
            "name one in Session Manager's preferences, or switch it off",
        )
    if re.search(
        r"ExpiredToken|token (included in the request )?is expired|session .*has expired|Error loading SSO", said
    ):
        return UserError("your AWS credentials have expired", "log in again, for example with: aws sso login")
    if re.search(r"Unable to locate credentials|NoCredentials|InvalidClientTokenId|UnrecognizedClient", said):
        return UserError("no valid AWS credentials", "run `aws configure`, or set AWS_PROFILE or --profile")
    if profile := re.search(r"config profile \((.*?)\) could not be found", said):
        return UserError(f"no AWS profile {profile[1]}", "see `aws configure list-profiles`")
    if "AccessDenied" in said:
        return UserError(
            f"{node}: you may not start SSM sessions with it",
            "have your policy allow ssm:StartSession on the cluster (arn:aws:sagemaker:*:*:cluster/*) and on the"
            f" documents {SSH_DOCUMENT} and {COMMAND_DOCUMENT}",
        )
    if "InvalidDocument" in said:
        return UserError(f"{node}: SSM lacks a document here: {_last_words(said)}", "use --ssm, which needs none")
    return None


def _last_words(said: str) -> str:
    """The line that tells most: the CLI's last, without the lines that the plugin writes around every session."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    telling = [line for line in lines if not re.match(r"(Starting|Exiting) session with SessionId", line)]
    return redacted(telling[-1]) if telling else ""


def _node(target: str) -> str:
    """`worker-group-1 i-0123` of a target."""
    return re.sub(r"-(i-[0-9a-f]+)$", r" \1", target.partition("_")[2])


def environment() -> dict[str, str]:
    """This process's, with the PATH that `require` looks at."""
    return {**os.environ, "PATH": search_path()}
