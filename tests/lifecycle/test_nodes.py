"""Every step for real, on nodes made of namespaces: real accounts, mounts, keys, sshd. Stand-ins: see image.py."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.lifecycle.cluster import Cluster, snapshot
from tests.lifecycle.instances import CONTROLLER, SETTINGS, Instance
from tests.lifecycle.nodes import LIGHT, SCRIPTS, Node, container, kill_tree, why_not_here
from tests.programs import write_program

pytestmark = pytest.mark.skipif(bool(why_not_here(LIGHT)), reason=why_not_here(LIGHT))

# Of the system, or of pyenv.
_PYTHON_38 = next(
    (
        str(path.parent)
        for folder in (Path("/usr/bin"), *sorted(Path.home().glob(".pyenv/versions/3.8.*/bin")))
        if (path := folder / "python3.8").exists()
    ),
    None,
)


@contextmanager
def nodes(
    directory: Path, workers: int, instance_type: str = "ml.c5.xlarge", provisioning: str = "api"
) -> Iterator[list[Node]]:
    """A controller and workers, each with the scripts. `directory` is empty."""
    addresses = [f"10.1.0.{number}" for number in range(12, 12 + workers)]
    groups = [Instance("worker-group-1", each, f"i-0123456789abcde{each[-2:]}", instance_type) for each in addresses]
    with container(directory, LIGHT) as opened:
        yield Cluster(opened, [CONTROLLER, *groups], directory, provisioning=provisioning).nodes


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A controller, where HyperPod has mounted the file system."""
    with nodes(tmp_path, workers=0) as (only,):
        yield only


@pytest.fixture
def legacy_node(tmp_path: Path) -> Iterator[Node]:
    """A controller, where these scripts mount it."""
    with nodes(tmp_path, workers=0, provisioning="legacy") as (only,):
        yield only


def outcomes(text: str) -> dict[str, str]:
    """What a run says of each step at the end."""
    found = {}
    for line in text.splitlines():
        words = line.split(" ", 2)
        if len(words) == 3 and words[1].endswith(":"):
            found[words[1][:-1]] = words[2].split(" (")[0].split(":")[0]
    return found


def assert_right(node: Node) -> None:
    """Nothing is left to do, nor anything half done."""
    said = outcomes(node.provision("--dry-run").stdout)
    assert set(said.values()) <= {"already so", "not needed", "finished"}, said
    left = [path for path in node.path("/srv/lustre/.provision/staging").iterdir() if node_number(node) in path.name]
    assert left == []
    for name in ("ubuntu", "alice", "bob"):
        folder = node.path(f"/srv/lustre/{name}/.ssh")
        assert sorted(path.name for path in folder.iterdir()) == ["authorized_keys", "id_ed25519", "id_ed25519.pub"]
        assert (folder / "authorized_keys").read_text() == (folder / "id_ed25519.pub").read_text()
        assert node.run("stat", "-c", "%U:%G", f"/fsx/{name}").stdout == f"{name}:{name}\n"
        assert node.run("getent", "shadow", name).stdout.startswith(f"{name}:")
        # The kind of file that many writers at once, or a killed one, would spoil.
        derived = node.run("ssh-keygen", "-y", "-P", "", "-f", f"/fsx/{name}/.ssh/id_ed25519").stdout
        assert derived.split()[:2] == (folder / "id_ed25519.pub").read_text().split()[:2]


def node_number(node: Node) -> str:
    identity: str = json.loads(node.path("/var/lib/provision/node.json").read_text())["instance_id"]
    return identity


def test_twice_is_once(node: Node) -> None:
    first = outcomes(node.provision().stdout)
    assert first.pop("neuron") == "not needed"
    assert set(first.values()) == {"changed", "finished"}
    assert_right(node)
    before = snapshot(node)
    assert len(before) > 50
    second = outcomes(node.run("bash", "-c", f"cd / && {' '.join(node.provision_command())}").stdout)
    assert set(second.values()) == {"already so", "not needed", "finished"}
    assert snapshot(node) == before
    log = node.path("/var/log/provision/provisioning.log").read_text()
    assert log.count("provision: finished") == 3
    lines = [json.loads(line) for line in node.path("/var/log/provision/steps.jsonl").read_text().splitlines()]
    assert {line["step"] for line in lines} >= {"identify", "fsx", "home", ""}


@pytest.mark.skipif(_PYTHON_38 is None, reason="no Python 3.8 on this machine")
def test_it_runs_on_python_3_8(node: Node) -> None:
    node.run("mkdir", "/tmp/bin")
    node.run("ln", "-s", f"{_PYTHON_38}/python3.8", "/tmp/bin/python3")
    path = {"PATH": "/tmp/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    assert node.run("python3", "--version", environment=path).stdout.startswith("Python 3.8.")
    node.provision(environment=path)
    assert_right(node)


def test_a_dry_run_of_a_new_node_changes_its_log_alone(node: Node) -> None:
    logs = ("disk/var",)
    before = snapshot(node)
    said = outcomes(node.provision("--dry-run").stdout)
    assert said["users"] == said["home"] == said["ssh_keys"] == "would change"
    after = snapshot(node)
    assert {key: after[key] for key in after if key not in logs} == {
        key: before[key] for key in before if key not in logs
    }


def test_a_node_knows_itself_without_instance_metadata(node: Node) -> None:
    node.provision(environment={"PROVISION_IMDS": "http://127.0.0.1:9"})
    assert node_number(node) == CONTROLLER.instance_id
    assert_right(node)


def test_many_nodes_at_once(tmp_path: Path) -> None:
    with nodes(tmp_path, workers=4) as machines:
        with ThreadPoolExecutor(len(machines)) as pool:
            list(pool.map(Node.provision, machines))
        for node in machines:
            assert_right(node)
        # However many nodes there are, each reads one file to know them all.
        shared = sorted(path.name for path in machines[0].path("/srv/lustre/.provision").iterdir())
        assert shared == ["ssh_host_ca", "staging"]
        known = {node.path("/etc/ssh/ssh_known_hosts_hyperpod_ft").read_text() for node in machines}
        assert len(known) == 1
        assert machines[0].path("/srv/lustre/ubuntu/.bashrc").read_text() == 'alias ll="ls -l"\n'
        before = [snapshot(node) for node in machines]
        with ThreadPoolExecutor(len(machines)) as pool:
            list(pool.map(Node.provision, machines))
        assert [snapshot(node) for node in machines] == before


def test_what_a_killed_run_was_preparing_is_removed(node: Node) -> None:
    node.provision()
    left = node.path(f"/srv/lustre/.provision/staging/{node_number(node)}.home.bob")
    left.mkdir()
    assert outcomes(node.provision().stdout)["fsx"] == "changed"
    assert_right(node)


def test_two_runs_on_one_node_follow_each_other(node: Node) -> None:
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: outcomes(node.provision().stdout), range(2))
    assert sorted([first["home"], second["home"]]) == ["already so", "changed"]
    assert_right(node)


def _slow_mount(node: Node, seconds: int) -> None:
    program = node.path("/usr/sbin/mount.lustre")
    program.write_text(program.read_text().replace("#!/bin/sh\n", f"#!/bin/sh\nsleep {seconds}\n"))


def test_ending_a_run_ends_its_commands(legacy_node: Node) -> None:
    _slow_mount(legacy_node, 300)
    script = f"cd {SCRIPTS} && timeout 1 python3 -B -m provision --only fsx"
    assert legacy_node.run("bash", "-c", script, check=False).returncode == 124
    assert legacy_node.run("pgrep", "-x", "sleep|python3", check=False).stdout.count("\n") == 1  # instance metadata


def test_what_a_killed_run_left_at_work_is_waited_for(legacy_node: Node, tmp_path: Path) -> None:
    _slow_mount(legacy_node, 2)
    script = f"cd {SCRIPTS} && exec python3 -B -m provision --only fsx"
    with legacy_node.start("bash", "-c", script, log=tmp_path / "killed.log"):
        while legacy_node.run("pgrep", "-x", "sleep", check=False).returncode:
            time.sleep(0.05)
        legacy_node.run("pkill", "-KILL", "--oldest", "-f", "python3 -B -m provision")
    legacy_node.provision()
    # Mounted by what the killed run left, and not once more on top.
    assert legacy_node.run("grep", "-c", " /fsx ", "/proc/self/mountinfo").stdout == "1\n"
    assert_right(legacy_node)


def test_the_first_key_stays(tmp_path: Path) -> None:
    """The slow node's ssh-keygen ends after the fast node has published its key."""
    with nodes(tmp_path, workers=1) as (slow, fast):
        for node in (slow, fast):
            node.provision("--only", "home")
        slow.run("mv", "/usr/bin/ssh-keygen", "/usr/bin/ssh-keygen.real")
        write_program(slow.path("/usr/bin/ssh-keygen"), 'ssh-keygen.real "$@" || exit\n[[ $1 != -q ]] || sleep 1')
        key = slow.path("/srv/lustre/ubuntu/.ssh/id_ed25519")
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(slow.provision)
            while not any(key.parent.glob(".*.id_ed25519.pub")):
                time.sleep(0.01)
            fast.provision()
            first = key.read_bytes()
            other.result()
        assert key.read_bytes() == first
        assert_right(slow)
        assert_right(fast)


def test_a_key_left_half_made_is_removed_when_all_else_is_so(node: Node) -> None:
    """This node was killed between making and publishing it, and another made the rest; it is a private key."""
    node.provision()
    left = node.path("/srv/lustre/ubuntu/.ssh") / f".{CONTROLLER.instance_id}.id_ed25519"
    assert left.parent.is_dir()
    left.write_text("a key")
    node.provision()
    assert not left.exists()
    assert_right(node)


SSHD = pytest.mark.skipif(not Path("/usr/sbin/sshd").exists(), reason="no sshd on this machine")
SSH = ("runuser", "-u", "alice", "--", "ssh", "-o", "BatchMode=yes", CONTROLLER.address)


def start_sshd(node: Node, *options: str) -> None:
    node.run("mkdir", "-p", "/run/sshd")
    node.run("bash", "-c", "pkill -x sshd; while pgrep -x sshd; do sleep 0.05; done")
    node.run("/usr/sbin/sshd", *options)


@SSHD
def test_a_user_goes_to_a_node_without_a_question(node: Node) -> None:
    node.provision()
    start_sshd(node)
    assert node.run(*SSH, "id -u; pwd").stdout == "2001\n/fsx/alice\n"
    assert_right(node)
    # An impostor is not believed, also with a certificate of its own.
    make = "rm -f ssh_host_* && ssh-keygen -q -t ed25519 -N '' -f ssh_host_ed25519_key"
    sign = "ssh-keygen -q -t ed25519 -N '' -f /tmp/ca && ssh-keygen -q -s /tmp/ca -I x -h -n"
    sign += f" {CONTROLLER.address} ssh_host_ed25519_key.pub"
    for change in (make, f"{make} && {sign}"):
        node.run("bash", "-c", f"cd /etc/ssh && {change}")
        start_sshd(node)
        refused = node.run(*SSH, "true", check=False)
        assert refused.returncode == 255
        assert "Host key verification failed" in refused.stderr
    # Another host key, as after a replacement, gets its own certificate.
    node.run("pkill", "-x", "sshd")
    assert outcomes(node.provision().stdout)["ssh_hosts"] == "changed"
    start_sshd(node)
    node.run(*SSH, "true")


@SSHD
def test_an_sshd_without_the_nodes_certificate_is_reported(node: Node) -> None:
    node.run("bash", "-c", "echo PidFile none >/tmp/plain")
    start_sshd(node, "-f", "/tmp/plain")
    for _ in range(2):
        done = node.provision("--only", "ssh_hosts")
        assert "/etc/ssh/sshd_config must include sshd_config.d/*.conf" in done.stdout
        assert outcomes(done.stdout)["ssh_hosts"] == "changed"


def test_the_authority_of_host_keys_is_roots_alone_and_vouches_for_nodes_alone(node: Node) -> None:
    node.provision()
    find = ("ssh-keygen", "-f", "/etc/ssh/ssh_known_hosts_hyperpod_ft", "-F")
    for name, known in (("10.1.7.7", True), ("ip-10-1-7-7", True), ("10.2.7.7", False), ("github.com", False)):
        assert (node.run(*find, name, check=False).returncode == 0) == known
    authority = "/fsx/.provision/ssh_host_ca"
    assert node.run("stat", "-c", "%a %U", authority).stdout == "600 root\n"
    for change in ("chmod 644", "chown alice"):
        node.run("bash", "-c", f"{change} {authority}")
        done = node.provision("--only", "ssh_hosts", check=False)
        assert done.returncode == 1
        assert f"{authority} is not root's alone; move it away" in done.stdout
        node.run("bash", "-c", f"chown root {authority} && chmod 600 {authority}")
    assert_right(node)


KEYS = ["ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIL0wbEe1 alice@laptop", "ssh-rsa AAAAB3NzaC1yc2EAAAADAQ== alice@work"]


def test_the_cluster_files_keys_of_a_user_open_that_account_alone(tmp_path: Path) -> None:
    users = [{**user, "public_keys": KEYS if user["name"] == "alice" else []} for user in SETTINGS["users"]]
    with container(tmp_path, LIGHT) as opened:
        (node,) = Cluster(opened, [CONTROLLER], tmp_path, users=users).nodes
        node.provision()
        folders = {name: node.path(f"/srv/lustre/{name}/.ssh") for name in ("alice", "bob", "ubuntu")}
        for name, folder in folders.items():
            own = (folder / "id_ed25519.pub").read_text().splitlines()
            assert (folder / "authorized_keys").read_text().splitlines() == [*own, *(KEYS if name == "alice" else [])]
        (folders["alice"] / "authorized_keys").write_text("")
        assert outcomes(node.provision().stdout)["ssh_keys"] == "changed"
        assert (folders["alice"] / "authorized_keys").read_text().count("laptop") == 1
        assert outcomes(node.provision().stdout)["ssh_keys"] == "already so"


def test_ids_of_others_are_named(node: Node) -> None:
    node.run("useradd", "--uid", "2001", "--no-create-home", "carol")
    node.run("groupadd", "--gid", "3000", "bob")
    done = node.provision(check=False)
    assert done.returncode == 1
    assert "uid 2001 of user alice is user carol's on this node" in done.stdout
    assert "group bob should have gid 2002 and has 3000 on this node" in done.stdout
    said = outcomes(done.stdout)
    assert (said["users"], said["home"], said["fsx"]) == ("failed", "not run", "changed")
    assert "alice" not in node.path("/etc/passwd").read_text()


def test_half_a_user_is_completed(node: Node) -> None:
    node.provision()
    node.run(
        "bash", "-c", "sed -i /alice/d /etc/shadow /etc/gshadow; echo 1 > /etc/passwd.lock; echo 1 >/etc/group.lock"
    )
    done = node.provision()
    assert outcomes(done.stdout)["users"] == "changed"
    assert_right(node)


def test_the_file_system_is_mounted_again_at_boot(legacy_node: Node) -> None:
    legacy_node.provision()
    legacy_node.run("umount", "/fsx")
    legacy_node.run("rm", "-r", "/run/provision")
    legacy_node.run("mount", "-a")
    assert legacy_node.run("cat", "/fsx/ubuntu/.bashrc").stdout
    # Written to once more, because it is another mount.
    assert outcomes(legacy_node.provision().stdout)["fsx"] == "changed"
    assert_right(legacy_node)


@pytest.mark.parametrize(
    ("before", "says"),
    [
        ("mkdir /fsx && touch /fsx/kept", "/fsx is not mounted and holds 'kept', which mounting would hide"),
        ("mkdir /fsx && mount -t tmpfs other /fsx", "/fsx: other (tmpfs) is mounted there, not fs-"),
        (
            "mkdir /fsx && mount -t tmpfs fs-9.fsx.us-west-2.amazonaws.com@tcp:/other /fsx",
            "/fsx: fs-9.fsx.us-west-2.amazonaws.com@tcp:/other (tmpfs) is mounted there, not fs-",
        ),
        (
            "mkdir /fsx && mount -t tmpfs 10.9.9.9@tcp:/4owupbev /fsx",
            "/fsx: 10.9.9.9@tcp:/4owupbev (tmpfs) is mounted there, not fs-",
        ),
        ("echo 'server:/x /fsx nfs defaults 0 0' >>/etc/fstab", "/etc/fstab: server:/x (nfs) is configured for /fsx"),
    ],
)
def test_what_is_in_the_way_of_the_file_system_is_named(legacy_node: Node, before: str, says: str) -> None:
    legacy_node.run("bash", "-c", before)
    done = legacy_node.provision(check=False)
    assert done.returncode == 1
    assert says in done.stdout
    assert outcomes(done.stdout)["home"] == "not run"


def test_where_hyperpod_mounts_it_is_only_looked_at(node: Node) -> None:
    fstab = node.path("/etc/fstab").read_text()
    # Lustre shows the address that the name has.
    node.run("bash", "-c", "umount /fsx && mount -t tmpfs 10.1.0.1@tcp:/4owupbev /fsx")
    node.provision()
    assert node.path("/etc/fstab").read_text() == fstab
    assert node.run("ls", "/fsx").stdout == "alice\nbob\nubuntu\n"
    node.run("umount", "-l", "/fsx")
    assert reports(node, "fsx", "HyperPod has not mounted /fsx; see FsxLustreConfig of the instance group")


def test_a_file_system_that_cannot_be_written_to(legacy_node: Node) -> None:
    legacy_node.path("/usr/sbin/mount.lustre").write_text(
        '#!/bin/sh\nmount --bind /srv/lustre "$2" && mount -o remount,bind,ro "$2"\n'
    )
    assert reports(legacy_node, "fsx", "/fsx cannot be written to: [Errno 30] Read-only file system")


def reports(node: Node, step: str, text: str) -> bool:
    """Whether a step that tries again and again says this; then it is killed."""
    with node.start("bash", "-c", f"cd {SCRIPTS} && exec python3 -B -m provision --only {step}") as process:
        assert process.stdout is not None
        try:
            return any(text in line for line in process.stdout)
        finally:
            kill_tree(process.pid)


def test_homes_that_are_there_stay_as_they_are(node: Node) -> None:
    shared = node.path("/srv/lustre")
    node.run("bash", "-c", "cd /srv/lustre; mkdir ubuntu bob; echo mine >ubuntu/.bashrc; chown -R 1000:1000 ubuntu")
    node.run("bash", "-c", "mkdir -p /srv/lustre/alice; touch /srv/lustre/alice/x; chown 2009:2009 /srv/lustre/alice")
    done = node.provision(check=False)
    assert "/fsx/alice belongs to uid 2009, but alice has uid 2001 on this node" in done.stdout
    node.run("chown", "-R", "2001:2001", "/srv/lustre/alice")
    node.provision()
    assert (shared / "ubuntu/.bashrc").read_text() == "mine\n"
    assert not (shared / "alice/.bashrc").exists()
    # bob's was empty, and root's.
    assert (shared / "bob/.bashrc").stat().st_uid == 2002


def test_a_job_that_runs_already_does_not_keep_its_user_from_the_new_home(node: Node) -> None:
    """HyperPod may put a node back into Slurm before it runs these scripts. A sleep stands in for the job."""
    with node.start("runuser", "-u", "ubuntu", "--", "sleep", "60") as job:
        while not node.run("pgrep", "-u", "ubuntu", check=False).stdout:
            time.sleep(0.01)
        node.provision()
        assert node.run("getent", "passwd", "ubuntu").stdout.split(":")[5] == "/fsx/ubuntu"
        assert job.poll() is None
        node.run("pkill", "-u", "ubuntu")
    assert_right(node)


def test_a_user_cannot_lead_root_astray(node: Node) -> None:
    node.provision()
    for trap in (
        "ln -s /etc .ssh",
        "mkdir .ssh && ln -s /etc/shadow .ssh/authorized_keys",
        "mkdir .ssh && mkfifo .ssh/authorized_keys",
        "touch .ssh",
        "mkdir -m 0 .ssh",
        "chmod 500 .",
        "mkdir .ssh && truncate -s 1P .ssh/authorized_keys",
    ):
        clean = "cd /fsx/alice; chmod 750 . .ssh; rm -rf .ssh"
        node.run("runuser", "-u", "alice", "--", "bash", "-c", f"{clean}; {trap}")
        before = node.path("/etc/shadow").read_text()
        done = node.provision()
        assert "skipped: alice: " in done.stdout, trap
        assert node.path("/etc/shadow").read_text() == before
        assert not node.path("/etc/id_ed25519").exists()


def test_authorized_keys_may_be_of_any_bytes(node: Node) -> None:
    node.provision()
    for name in ("alice", "ubuntu"):
        write = rf"printf 'ssh-ed25519 AAAA jos\xe9@laptop\n' >/fsx/{name}/.ssh/authorized_keys"
        node.run("runuser", "-u", name, "--", "bash", "-c", write)
    said = node.provision().stdout
    assert "skipped" not in said
    for name in ("alice", "ubuntu"):
        lines = node.path(f"/srv/lustre/{name}/.ssh/authorized_keys").read_bytes().splitlines()
        assert lines[0] == b"ssh-ed25519 AAAA jos\xe9@laptop"
        assert len(lines) == 2


def test_a_damaged_key_of_the_default_user_is_an_error(node: Node) -> None:
    node.provision()
    node.run("bash", "-c", "echo x >/fsx/ubuntu/.ssh/id_ed25519")
    done = node.provision(check=False)
    assert done.returncode == 1
    assert "/fsx/ubuntu/.ssh/id_ed25519 is not a private key without a passphrase; move it away" in done.stdout


def _efa(node: Node) -> None:
    """Files stand in for EFA devices and the kernel's count of huge pages, which is the whole machine's."""
    node.run("bash", "-c", "echo 10 >/tmp/pages && mount --bind /tmp/pages /proc/sys/vm/nr_hugepages")
    node.run("mount", "-t", "tmpfs", "none", "/sys/class")
    node.run("mkdir", "-p", "/sys/class/infiniband/rdmap0s6")


def test_limits_are_raised_and_never_lowered(node: Node) -> None:
    _efa(node)
    node.run("bash", "-c", "echo 20000-20002 >/proc/sys/net/ipv4/ip_local_reserved_ports")
    configured = node.path("/etc/sysctl.d/10-mine.conf")
    configured.write_text("vm.nr_hugepages = 9000\nnet.ipv4.ip_local_reserved_ports = 7000\n")
    node.provision()
    reserved = node.path("/proc/sys/net/ipv4/ip_local_reserved_ports")
    assert node.run("cat", "/tmp/pages").stdout == "5128\n"
    assert reserved.exists()
    assert (
        node.run("cat", "/proc/sys/net/ipv4/ip_local_reserved_ports").stdout == "10000-20002,29500,41000,44000,48620\n"
    )
    text = node.path("/etc/sysctl.d/zz-hyperpod-ft.conf").read_text()
    assert "vm.nr_hugepages = 9000\n" in text
    assert "ip_local_reserved_ports = 7000,10000-19999,29500,41000,44000,48620\n" in text
    node.run("bash", "-c", "echo 6000 >/tmp/pages")
    assert outcomes(node.provision().stdout)["limits"] == "already so"
    assert node.run("cat", "/tmp/pages").stdout == "6000\n"


def test_slurmd_that_runs_gets_its_limit_without_a_restart(tmp_path: Path) -> None:
    """A sleep stands in for slurmd."""
    with nodes(tmp_path, workers=1) as (_, worker):
        _efa(worker)
        worker.run("cp", "/usr/bin/sleep", "/usr/local/bin/slurmd")
        script = "ulimit -l 64; setsid slurmd 60 >/dev/null 2>&1 & echo $!"
        pid = worker.run("bash", "-c", script, environment={"PATH": "/usr/local/bin:/usr/bin:/bin"}).stdout.strip()
        done = worker.provision()
        limits = worker.run("cat", f"/proc/{pid}/limits").stdout
        if int(worker.run("grep", "CapEff", "/proc/self/status").stdout.split()[1], 16) >> 24 & 1:
            assert "Max locked memory         unlimited            unlimited" in limits
        else:  # root of some containers may not
            assert f"slurmd ({pid}) keeps its limit on locked memory" in done.stdout
        drop_in = worker.path("/etc/systemd/system/slurmd.service.d/50-hyperpod-ft.conf")
        assert "LimitMEMLOCK=infinity" in drop_in.read_text()


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ('[[ $1 == --json-output ]] && echo "[$(printf "{},%.0s" {1..15}){}]"', "not so"),
        ('[[ $1 == --output-format ]] && echo "{\\"devices\\": [$(printf "{},%.0s" {1..15}){}]}"', "not so"),
        ('echo "[{},{}]"', "2 of the 16 Neuron devices of ml.trn1.32xlarge; replace the node"),
        ('echo "no driver" >&2; exit 1', "neuron-ls: no driver"),
    ],
)
def test_neuron_devices_are_counted(tmp_path: Path, program: str, says: str) -> None:
    """A script stands in for AWS's neuron-ls."""
    with nodes(tmp_path, workers=1, instance_type="ml.trn1.32xlarge") as (_, worker):
        write_program(worker.path("/opt/aws/neuron/bin/neuron-ls"), program)
        done = worker.provision("--only", "neuron", check=False)
        if says == "not so":
            assert outcomes(done.stdout)["neuron"] == "already so"
            assert done.returncode == 0
        else:
            assert says in done.stdout
            assert done.returncode == 1


def test_a_source_of_packages_that_is_gone_keeps_none_of_the_others_out(node: Node) -> None:
    """Scripts stand in for dpkg and apt-get."""
    for name, does in (("dpkg", "true"), ("apt-get", '[ "$1" = install ] && touch /tmp/installed')):
        write_program(node.path(f"/opt/slurm/bin/{name}"), does)
    code = (
        "from pathlib import Path\n"
        "from provision import apt\n"
        "from provision.journal import Journal\n"
        "from provision.node import Node\n"
        "apt.install(Node(Path('/'), None, Journal(None), Path('.')), ['mariadb-server'])\n"
    )
    node.run("bash", "-c", f'cd {SCRIPTS} && python3 -B -c "{code}"')
    assert node.path("/tmp/installed").exists()


_EPILOG = "/opt/slurm/etc/epilog.d/800_hyperpod-ft.sh"


def _epilog(node: Node, jobs: str, sessions: str = "true") -> None:
    for name, does in (("squeue", jobs), ("loginctl", sessions)):
        write_program(node.path(f"/opt/slurm/bin/{name}"), does)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": "2001", "SLURMD_NODENAME": "node1"}
    node.run(_EPILOG, environment=job)


def test_the_epilog_ends_what_a_job_left_behind(node: Node) -> None:
    """Scripts stand in for squeue and loginctl."""
    node.provision()
    node.run(
        "runuser",
        "-u",
        "alice",
        "--",
        "bash",
        "-c",
        "mkdir /dev/shm/a; touch /dev/shm/a/b; setsid sleep 99 >/dev/null 2>&1 & true",
    )
    node.run("runuser", "-u", "bob", "--", "bash", "-c", "touch /dev/shm/c; setsid sleep 99 >/dev/null 2>&1 & true")
    alive = ("pgrep", "-c", "-u")
    for jobs, sessions in (
        ("exit 1", "true"),
        ("echo 7; echo 8", "true"),
        ("echo 7", "exit 1"),
        ("echo 7", "echo '    12  2001 alice seat0 pts/0'"),
    ):
        _epilog(node, jobs, sessions)
        assert node.run(*alive, "alice").stdout == "1\n", (jobs, sessions)
        assert node.run("ls", "/dev/shm").stdout == "a\nc\n"
    # A job of hers starts while Slurm is asked.
    new = "runuser -u alice -- bash -c 'touch -d yesterday /dev/shm/new; setsid sleep 98 >/dev/null 2>&1 &'"
    _epilog(node, f"sleep 0.1; {new}; echo 7")
    assert node.run("pgrep", "-u", "alice", "-a").stdout.split()[1:] == ["sleep", "98"]
    assert node.run("ls", "/dev/shm").stdout == "c\nnew\n"
    # What does not end when asked to.
    node.run("runuser", "-u", "alice", "--", "bash", "-c", "trap '' TERM; setsid sleep 999 >/dev/null 2>&1 & true")
    _epilog(node, "echo 7")
    # SIGKILL is sent; the process goes when the node's init has reaped it.
    while node.run(*alive, "alice", check=False).stdout != "0\n":
        time.sleep(0.05)
    assert node.run("ls", "/dev/shm").stdout == "c\n"
    assert node.run(*alive, "bob").stdout == "1\n"


def test_the_epilog_never_drains_a_node(node: Node) -> None:
    node.provision("--only", "epilog")
    for environment in ({}, {"PATH": "/nowhere"}):
        node.run("/bin/bash", _EPILOG, environment=environment)


def test_a_failure_is_in_the_log_before_the_script_ends(node: Node) -> None:
    node.path(f"{SCRIPTS}/settings.json").write_text("{}")
    started = time.monotonic()
    done = node.provision(environment={"PROVISION_FAILURE_WAIT_SECONDS": "1"}, check=False)
    assert done.returncode == 2
    assert time.monotonic() - started >= 1
    log = node.path("/var/log/provision/provisioning.log").read_text()
    assert "settings.json: 'version' is missing" in log
    assert "failed with exit status 2" in log


def test_what_a_dead_file_system_holds_does_not_keep_the_script_from_ending(node: Node) -> None:
    """A process that left its group stands in for one that the kernel does not let go; its output is the script's.

    And a `sync` that hangs for one that waits for the dead file system.
    """
    (node.path(SCRIPTS) / "provision/__main__.py").write_text(
        "import subprocess, sys\n"
        "subprocess.Popen(['sleep', '300'], start_new_session=True)\n"
        "sys.exit('fsx: failed: not done after 300 s')\n"
    )
    write_program(node.path("/usr/local/bin/sync"), '[ -n "$1" ] || exec sleep 300')
    started = time.monotonic()
    done = node.provision(environment={"PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}, check=False)
    assert time.monotonic() - started < 30
    assert done.returncode == 1
    log = node.path("/var/log/provision/provisioning.log").read_text()
    assert "not done after 300 s" in log
    assert "failed with exit status 1" in log


def test_a_node_without_python_says_so(node: Node) -> None:
    for name in ("bash", "sed", "head", "getent", "tee", "date", "mkdir", "dirname", "sync", "sleep"):
        node.run("bash", "-c", f"mkdir -p /tmp/bin; ln -s $(command -v {name}) /tmp/bin/{name}")
    node.run("bash", "-c", "rm -f /usr/bin/python3")
    done = node.provision(environment={"PATH": "/tmp/bin:/usr/sbin"}, check=False)
    assert done.returncode == 1
    assert "no Python 3.8 or newer on this node" in done.stdout


_SEED = 5


@pytest.mark.timeout(480)
def test_killed_anywhere_and_run_again(tmp_path: Path) -> None:
    """Two nodes at a time: one is killed at random moments while the other runs; then both are right, with one key."""
    moments = random.Random(_SEED)
    for number in range(12):
        folder = tmp_path / str(number)
        folder.mkdir()
        with nodes(folder, workers=1) as (one, two):
            with ThreadPoolExecutor(2) as pool:
                other = pool.submit(two.provision)
                for _ in range(4):
                    seconds = f"{moments.uniform(0.1, 0.7):.3f}"
                    # A pid namespace of its own, so that everything the run started dies in the same instant.
                    killed = ("timeout", "-s", "KILL", seconds, "unshare", "-p", "--fork", "--kill-child")
                    one.run(*killed, *one.provision_command(), check=False)
                other.result()
            one.provision()
            assert_right(one)
            assert_right(two)
