"""SSM sessions through the AWS CLI: their errors, and nodes that hang."""

from pathlib import Path

import pytest

from hyperpod_ft.cluster.ssh import ssm
from hyperpod_ft.errors import UserError
from tests.aws import ssh_nodes
from tests.aws.conftest import REGION
from tests.aws.ssh_cluster import AWS_CLI
from tests.aws.ssh_nodes import Nodes
from tests.programs import write_program

nodes = ssh_nodes.nodes  # fixture


class TestSessions:
    @pytest.mark.parametrize(
        ("output", "message"),
        [
            ("SessionManagerPlugin is not found. Please", "session-manager-plugin is not installed; install it: https"),
            (
                "(TargetNotConnected) when calling the StartSession operation: x is not",
                "w i-0123: its SSM agent is not",
            ),
            ("failed to start pty since RunAs user ubuntu does not exist", "logs in as ubuntu .*clear Run As"),
            ("please set the RunAs default user", "Run As is enabled without a user"),
            (
                "An error occurred (ExpiredTokenException) when calling",
                "no valid AWS credentials: .*ExpiredToken.*; log in again",
            ),
            (
                "Unable to locate credentials. You can",
                "no valid AWS credentials: Unable to locate.*run `aws configure`",
            ),
            (
                "The config profile (x y) could not be found",
                r"no valid AWS credentials: The config profile \(x y\) could not be found; .*--profile",
            ),
            ("An error occurred (AccessDeniedException) when calling", "allow ssm:StartSession"),
            ("An error occurred (InvalidDocument) when calling", "use --ssm"),
            ("\nStarting session with SessionId: a-1\nboom AKIAABCDEFGHIJKLMNOP\n", r"no session: boom \.\.\.; "),
            ("", "gave no error message"),
        ],
    )
    def test_a_failure_becomes_one_line_with_a_remedy(self, output: str, message: str) -> None:
        with pytest.raises(UserError, match=message):
            raise ssm.session_error(output, "sagemaker-cluster:abc_w-i-0123")

    def test_missing_programs(self, nodes: Nodes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(ssm, "_USUAL_PLACES", ())
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
        ssm.require("aws", "session-manager-plugin")
        (tmp_path / "bin" / "session-manager-plugin").unlink()
        with pytest.raises(UserError, match=r"session-manager-plugin is not installed; install it: https://docs.aws"):
            ssm.tunnel(AWS_CLI, "sagemaker-cluster:abc_w-i-0123")
        (tmp_path / "bin" / "aws").unlink()
        with pytest.raises(UserError, match=r"the AWS CLI \(aws\) is not installed; install it: https://docs.aws"):
            ssm.run(AWS_CLI, "sagemaker-cluster:abc_w-i-0123", "true", "answer")

    def test_a_node_that_hangs(self, nodes: Nodes, tmp_path: Path) -> None:
        """The plugin, a child of the CLI, keeps the output open; the kit must not wait for it."""
        write_program(tmp_path / "bin" / "aws", "sleep 60 & wait")
        with pytest.raises(UserError, match=r"w i-0123: no answer within 0\.2 s; /fsx may hang; .*--ssm"):
            ssm.run(AWS_CLI, "sagemaker-cluster:abc_w-i-0123", "true", "answer", seconds=0.2)

    def test_a_refused_document_is_replaced_by_the_other_of_awss_own(self, nodes: Nodes, tmp_path: Path) -> None:
        account, tried = ssm.AwsCli(REGION), tmp_path / "tried"
        target = "sagemaker-cluster:abc_w-i-0123"
        refusal = "An error occurred (AccessDeniedException) when calling the StartSession operation: not you"
        program = f"""echo "$*" | grep -o "A[A-Za-z-]*Command" >>{tried}
if [ -e {tmp_path}/none ] || ! grep -q Amazon <<<"$*"; then echo '{refusal}' >&2; exit 254; fi
echo "answer: 42" """
        write_program(tmp_path / "bin" / "aws", program)
        assert [ssm.run(account, target, "true", "answer:") for _ in range(2)] == ["42", "42"]
        first, second = ssm.COMMAND_DOCUMENTS
        assert tried.read_text().split() == [first, second, second], "what worked is remembered"
        (tmp_path / "none").touch()
        with pytest.raises(UserError, match=f"w i-0123: not allowed to start SSM sessions; .*{first}"):
            ssm.run(account, target, "true", "answer:")
