"""The user's key: which files are accepted, and how the key gets into authorized_keys on the node."""

import os
import shlex
import shutil
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from hyperpod_ft.cluster.ssh import connect as ssh
from hyperpod_ft.cluster.ssh import key as ssh_key
from hyperpod_ft.errors import UserError
from tests.aws import ssh_nodes
from tests.aws.ssh_nodes import USER, Nodes, new_key

nodes = ssh_nodes.nodes  # fixture


ED25519 = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"


COMMENT = "'; touch pwned; $(touch pwned) `touch pwned` \" | & \\ %s #"


class TestTheKey:
    @pytest.mark.parametrize("text", [ED25519, f"{ED25519} me@there\n", f"\n{ED25519} {COMMENT}\r\n\n"])
    def test_one_line_is_taken_as_it_is(self, text: str) -> None:
        assert ssh_key.checked(text, "key.pub") == text.strip()

    @pytest.mark.parametrize(
        "text",
        [
            "",
            f"{ED25519}\n{ED25519}\n",
            f"{ED25519} a\x1b]0;b\n",
            f"{ED25519} a\x00b\n",
            f"{ED25519} a\u2028b\n",
            f'command="rm -rf ~" {ED25519}\n',
            ED25519.replace("ssh-ed25519", "ssh-rsa"),
            ED25519.replace("ssh-ed25519", "ssh-dss"),
            "ssh-ed25519 AAAA;touch",
            "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEAAAAA\n-----END OPENSSH PRIVATE KEY-----\n",
        ],
    )
    def test_nothing_else_leaves_this_machine(self, text: str) -> None:
        with pytest.raises(UserError, match=r"key\.pub: ") as error:
            ssh_key.checked(text, "key.pub")
        assert "b3Blbn" not in str(error.value)

    def test_the_first_usual_one_or_the_one_given(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="ssh-keygen -t ed25519"):
            ssh_key.find(None, tmp_path)
        for name in ("id_rsa", "id_ecdsa", "work"):
            new_key(tmp_path / name, name)
        assert ssh_key.find(None, tmp_path).line.endswith(" id_ecdsa")
        for given in ("work", "work.pub"):
            found = ssh_key.find(tmp_path / given, tmp_path)
            assert (found.file, found.line.split()[-1]) == (tmp_path / "work", "work")
        (tmp_path / "work").unlink()
        assert ssh_key.find(tmp_path / "work", tmp_path).file == tmp_path / "work.pub", "its private key is an agent's"

    def test_a_private_key_alone_says_how_to_make_the_public_one(self, tmp_path: Path) -> None:
        new_key(tmp_path / "my key")
        (tmp_path / "my key.pub").unlink()
        with pytest.raises(UserError, match=r"ssh-keygen -y -f '.*my key' >'.*my key\.pub'"):
            ssh_key.find(tmp_path / "my key", tmp_path)

    def test_the_command_holds_words_and_base64_only(self) -> None:
        line = f"{ED25519} {COMMENT}"
        *shell, script = shlex.split(ssh_key.command("alice", line))
        assert shell == ["sh", "-c"]
        assert set(script) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/= |-")
        for user in ("alice; true", "$(true)", "-u", "", "alice bob"):
            with pytest.raises(UserError, match="not a Linux user name"):
                ssh_key.command(user, line)
            with pytest.raises(UserError, match="not a Linux user name"):
                ssh.SshRequest(user)


@pytest.fixture
def put(nodes: Nodes) -> Callable[..., str]:
    """Run the command on a stand-in for a node as SSM's agent does: split into words, no shell, closed stdin."""
    nodes.add("i-1")

    def run(line: str, user: str = USER) -> str:
        environment = {**os.environ, "PATH": f"{nodes.directory / 'i-1' / 'bin'}:{os.environ['PATH']}"}
        words = shlex.split(ssh_key.command(user, line))
        done = subprocess.run(
            words, check=False, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.removeprefix("hyperpod-ft-key: ").strip()

    return run


class TestOnTheNode:
    def test_no_file_yet(self, nodes: Nodes, put: Callable[..., str]) -> None:
        assert put(ED25519) == "added"
        assert nodes.authorized_keys.read_text() == f"{ED25519}\n"
        assert stat.S_IMODE(nodes.authorized_keys.stat().st_mode) == 0o600
        assert stat.S_IMODE(nodes.authorized_keys.parent.stat().st_mode) == 0o700

    @pytest.mark.parametrize(
        ("before", "after", "said"),
        [
            ("", f"{ED25519} new\n", "added"),
            ("ssh-rsa AAAA other", f"ssh-rsa AAAA other\n{ED25519} new\n", "added"),
            ("ssh-rsa AAAA other\n", f"ssh-rsa AAAA other\n{ED25519} new\n", "added"),
            (f"# {ED25519} new\n", f"# {ED25519} new\n{ED25519} new\n", "added"),
            (f"{ED25519} old\n", f"{ED25519} old\n", "present"),
            (f'from="10.0.0.0/8" {ED25519}', f'from="10.0.0.0/8" {ED25519}', "present"),
        ],
    )
    def test_exactly_once(self, nodes: Nodes, put: Callable[..., str], before: str, after: str, said: str) -> None:
        nodes.authorized_keys.parent.mkdir()
        nodes.authorized_keys.write_text(before)
        nodes.authorized_keys.chmod(0o644)
        assert put(f"{ED25519} new") == said
        assert put(f"{ED25519} new") == "present"
        assert nodes.authorized_keys.read_text() == after
        assert stat.S_IMODE(nodes.authorized_keys.stat().st_mode) == 0o600

    def test_many_at_once(self, nodes: Nodes, put: Callable[..., str]) -> None:
        said: list[str] = []
        threads = [threading.Thread(target=lambda: said.append(put(ED25519))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(said) == ["added"] + 7 * ["present"]
        assert nodes.authorized_keys.read_text() == f"{ED25519}\n"

    def test_a_comment_is_text(self, nodes: Nodes, put: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(nodes.shared)
        assert put(f"{ED25519} {COMMENT}") == "added"
        assert nodes.authorized_keys.read_text() == f"{ED25519} {COMMENT}\n"
        assert [path.name for path in nodes.shared.iterdir()] == [".ssh"]

    def test_no_such_user(self, put: Callable[..., str]) -> None:
        assert put(ED25519, "nobody") == "no-user"

    def test_no_home(self, nodes: Nodes, put: Callable[..., str]) -> None:
        nodes.shared.rmdir()
        assert put(ED25519).startswith("failed: ")

    @pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
    def test_as_root_all_is_the_users_and_no_link_of_theirs_is_followed_further(
        self, nodes: Nodes, put: Callable[..., str]
    ) -> None:
        with tempfile.TemporaryDirectory() as directory:
            home = Path(directory)
            shutil.chown(home, "nobody")
            nodes.user("i-1", "nobody", home)
            assert put(ED25519, "nobody") == "added"
            keys = home / ".ssh" / "authorized_keys"
            assert (keys.owner(), keys.parent.owner()) == ("nobody", "nobody")
            roots = nodes.shared / "roots"
            roots.touch()
            keys.unlink()
            keys.symlink_to(roots)
            assert put(ED25519, "nobody").startswith("failed: ")
            assert roots.read_text() == ""
