"""The shared file system, accounts and homes: mounted, completed, kept as they are, and what is in their way."""

from __future__ import annotations

import pytest

from tests.lifecycle.nodes import SCRIPTS, Node, kill_tree
from tests.lifecycle.provisioned.provisioned_nodes import assert_right, outcomes
from tests.waiting import wait_for


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
    with node.start("runuser", "-u", "ubuntu", "--", "sleep", "3600") as job:
        wait_for(lambda: node.run("pgrep", "-u", "ubuntu", check=False).stdout)
        node.provision()
        assert node.run("getent", "passwd", "ubuntu").stdout.split(":")[5] == "/fsx/ubuntu"
        assert job.poll() is None
        node.run("pkill", "-u", "ubuntu")
    assert_right(node)
