"""Limits, devices, packages and the epilog, with files and scripts that stand in for the hardware and Slurm."""

from __future__ import annotations

import json
from pathlib import Path

from tests.lifecycle.nodes import SCRIPTS, Node
from tests.lifecycle.provisioned.provisioned_nodes import nodes, outcomes
from tests.programs import write_program
from tests.waiting import wait_for


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
        script = "ulimit -l 64; setsid slurmd 3600 >/dev/null 2>&1 & echo $!"
        pid = worker.run("bash", "-c", script, environment={"PATH": "/usr/local/bin:/usr/bin:/bin"}).stdout.strip()
        done = worker.provision()
        limits = worker.run("cat", f"/proc/{pid}/limits").stdout
        if int(worker.run("grep", "CapEff", "/proc/self/status").stdout.split()[1], 16) >> 24 & 1:
            assert "Max locked memory         unlimited            unlimited" in limits
        else:  # root of some containers may not
            assert f"slurmd ({pid}) keeps its limit on locked memory" in done.stdout
        drop_in = worker.path("/etc/systemd/system/slurmd.service.d/50-hyperpod-ft.conf")
        assert "LimitMEMLOCK=infinity" in drop_in.read_text()


def test_neuron_devices_are_counted(tmp_path: Path) -> None:
    """A script stands in for AWS's neuron-ls, by turns of a version with each of its options, and of a later one."""
    with nodes(tmp_path, workers=1, instance_type="ml.trn1.32xlarge") as (_, worker):
        device, devices = (json.dumps([{"neuron_device": 0}] * count) for count in (1, 16))
        for program, says in (
            (f"[[ $1 == --json-output ]] && echo '{devices}'", ""),
            (f"""[[ $1 == --output-format ]] && echo '{{"devices": {devices}}}'""", ""),
            (f"echo '{device}'", "1 of the 16 Neuron devices of ml.trn1.32xlarge; replace the node"),
            ('echo "no driver" >&2; exit 1', "neuron-ls: no driver"),
            ("[[ $# == 0 ]] && echo 16 devices", "0 of the 16 Neuron devices"),
            ("""touch /dev/neuron{0..15}; echo '{"nodes": [{"devices": 16}]}'""", ""),
        ):
            write_program(worker.path("/opt/aws/neuron/bin/neuron-ls"), program)
            done = worker.provision("--only", "neuron", check=False)
            assert (done.returncode, says in done.stdout) == (bool(says), True), (program, done.stdout)
            assert says or outcomes(done.stdout)["neuron"] == "already so"
        assert "a format that the kit does not know" in done.stdout


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
    wait_for(lambda: node.run(*alive, "alice", check=False).stdout == "0\n", every=0.05)
    assert node.run("ls", "/dev/shm").stdout == "c\n"
    assert node.run(*alive, "bob").stdout == "1\n"


def test_the_epilog_keeps_memory_checkpoints_for_an_hour(node: Node) -> None:
    """A job that Slurm requeues after the loss of another node resumes from them."""
    node.provision("--only", "users", "--only", "epilog")
    for user, job, minutes in (("alice", "2001-a", 58), ("alice", "2001-b", 62), ("bob", "2002-c", 62)):
        directory = f"/dev/shm/hyperpod-ft-{job}"
        made = f"mkdir -p {directory}/node1; touch {directory}/node1/rank-00000.0.json"
        aged = f"find {directory} -exec touch -d '{minutes} minutes ago' {{}} +"
        node.run("runuser", "-u", user, "--", "bash", "-c", f"{made}; {aged}; touch /dev/shm/{job}")
    node.run("runuser", "-u", "bob", "--", "bash", "-c", "setsid sleep 99 >/dev/null 2>&1 & true")
    files = ("find", "/dev/shm", "-type", "f", "-printf", "%P\n")
    young, of_bob = "hyperpod-ft-2001-a/node1/rank-00000.0.json", "hyperpod-ft-2002-c/node1/rank-00000.0.json"
    _epilog(node, "echo 7")
    assert set(node.run(*files).stdout.split()) == {young, "2002-c", of_bob}, "bob has a process"
    node.run("pkill", "-U", "bob")
    wait_for(lambda: node.run("pgrep", "-c", "-u", "bob", check=False).stdout == "0\n", every=0.05)
    _epilog(node, "echo 7")
    assert set(node.run(*files).stdout.split()) == {young, "2002-c"}


def test_the_epilog_never_drains_a_node(node: Node) -> None:
    node.provision("--only", "epilog")
    for environment in ({}, {"PATH": "/nowhere"}):
        node.run("/bin/bash", _EPILOG, environment=environment)
