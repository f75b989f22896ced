"""A local cluster is a real Slurm: how it starts, what it refuses, who may have one, and its commands."""

import os
import pwd
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

import hyperpod_ft
from hyperpod_ft.errors import UserError
from hyperpod_ft.localcluster import LocalCluster, default_directory, programs
from hyperpod_ft.localcluster import cli as local
from hyperpod_ft.localcluster.ports import BLOCK, reserve_ports
from hyperpod_ft.localcluster.slurm_conf import ClusterSpec, render_cgroup_conf, render_slurm_conf
from tests.slurm.local_clusters import assert_gone, run, start_python

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


def test_up_and_down(own: LocalCluster) -> None:
    assert not own.status().running
    assert own.up(nodes=3, cpus=5, memory_mb=1_000_000)
    status = own.status()
    assert status.running
    assert status.nodes == (("node1", "idle"), ("node2", "idle"), ("node3", "idle"))
    assert len(status.ports) == 4
    assert status.slurm_version.count(".") == 2
    assert run(own, "sinfo", "-h", "-o", "%P %D %c %m").split() == ["dev*", "3", "5", "1000000"]

    assert not own.up(nodes=3, cpus=5)
    assert own.status().pid == status.pid
    with pytest.raises(UserError, match=r"3 nodes x 5 CPUs is already up, not 2 x 4; .*local down"):
        own.up()

    assert own.down()
    assert_gone(own)
    assert not own.down()


def test_impossible_sizes_are_refused(own: LocalCluster) -> None:
    for nodes, cpus in ((0, 4), (128, 4), (2, 0)):
        with pytest.raises(UserError, match="use 1 to 127 nodes"):
            own.up(nodes=nodes, cpus=cpus)


def test_several_started_at_once_have_their_own_ports_and_jobs(slurm_installed: None, tmp_path: Path) -> None:
    clusters = [LocalCluster(tmp_path / name) for name in "abc"]
    try:
        with ThreadPoolExecutor() as pool:
            assert all(pool.map(lambda cluster: cluster.up(nodes=1, bound_to=os.getpid()), clusters))
        ports = [port for cluster in clusters for port in cluster.status().ports]
        assert len(set(ports)) == 6
        jobs = {run(cluster, "sbatch", "--parsable", "-o", "/dev/null", "--wrap", "true") for cluster in clusters}
        assert len(jobs) == 3  # ports derived from job ids must differ too
        assert clusters[0].down()
        assert run(clusters[1], "srun", "echo", "still up") == "still up\n"
    finally:
        for cluster in clusters:
            cluster.down()


def test_one_directory_started_twice_at_once_is_one_cluster(own: LocalCluster) -> None:
    with ThreadPoolExecutor() as pool:
        assert sorted(pool.map(lambda _: own.up(nodes=1), range(3))) == [False, False, True]
    assert own.status().nodes == (("node1", "idle"),)


def test_any_directory_name_will_do(slurm_installed: None, tmp_path: Path) -> None:
    directory = tmp_path / "a, b=c # ü" / ("long" * 30)
    cluster = LocalCluster(directory)
    try:
        cluster.up(bound_to=os.getpid())
        assert run(cluster, "srun", "-N2", "echo", "here") == "here\nhere\n"
        assert (directory / "logs" / "slurmd.node2.log").stat().st_size > 0
    finally:
        cluster.down()


def test_job_ids_are_not_used_again(own: LocalCluster) -> None:
    jobs = []
    for _ in range(2):
        own.up(nodes=1)
        jobs.append(int(run(own, "sbatch", "--parsable", "-o", "/dev/null", "--wrap", "true")))
        own.down()
    assert jobs[1] - jobs[0] > 10_000


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """One that other users may enter, unlike tmp_path."""
    with tempfile.TemporaryDirectory(prefix="hyperpod-ft-test-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def runs_for(python: str, user: pwd.struct_passwd) -> bool:
    argv = [python, "-c", "import sys; sys.exit(sys.version_info < (3, 10))"]
    try:
        return subprocess.run(argv, user=user.pw_uid, cwd="/", capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user; the other tests ran as this one")
def test_ordinary_user(slurm_installed: None, open_directory: Path) -> None:
    user = pwd.getpwnam("nobody")
    python = next(filter(lambda path: runs_for(path, user), (sys.executable, "/usr/bin/python3")), None)
    if python is None:
        pytest.skip("nobody may not run this Python, nor is there another of 3.10 or newer")
    home = open_directory / "home"
    home.mkdir()
    # The checkout may be as private as the interpreter; local clusters need the standard library only.
    # Other processes may compile its modules meanwhile, into files that vanish.
    source, compiled = Path(hyperpod_ft.__file__).parent, shutil.ignore_patterns("__pycache__")
    shutil.copytree(source, open_directory / "hyperpod_ft", ignore=compiled)
    os.chown(home, user.pw_uid, user.pw_gid)
    code = """if True:
        import os, subprocess
        from hyperpod_ft.localcluster import LocalCluster, default_directory
        cluster = LocalCluster(default_directory())
        cluster.up()
        argv = ["timeout", "300", "srun", "-N2", "id", "-un"]
        subprocess.run(argv, env={**os.environ, **cluster.environment()}, stdin=subprocess.DEVNULL, check=True)
        cluster.kill_node("node1")
        cluster.start_node("node1")
        assert cluster.down()
        print(cluster.directory, cluster.conf)"""
    answer = subprocess.run(
        [python, "-c", code],
        user=user.pw_uid,
        group=user.pw_gid,
        extra_groups=[],
        # No sbin, as for an ordinary user.
        env={"PATH": "/usr/bin:/bin", "HOME": str(home), "PYTHONPATH": str(open_directory)},
        cwd=home,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    *names, last = answer.stdout.splitlines()
    assert names == ["nobody", "nobody"]
    directory, conf = last.split()
    assert directory == str(home / ".local/state/hyperpod-ft/local")
    assert not Path(conf).parent.exists()


def test_commands(own: LocalCluster) -> None:
    def invoke(*arguments: str) -> str:
        result = CliRunner().invoke(local.app, arguments, env={"HYPERPOD_FT_LOCAL": str(own.directory)})
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.output

    assert invoke("status").startswith("down")
    with pytest.raises(UserError, match=r"no local cluster is running in .*`hyperpod-ft local up`"):
        invoke("env")
    assert invoke("up", "--nodes", "2", "--cpus", "3", "--die-with", str(os.getpid())).startswith("up\n")
    assert invoke("up", "--cpus", "3").startswith("already up\n")
    assert invoke("env") == f"export SLURM_CONF={own.conf}\n"
    assert invoke("kill-node", "node2") == "node2 is off\n"
    assert "node2  down" in invoke("status")
    assert invoke("start-node", "node2") == "node2 is on\n"
    assert "node2  idle" in invoke("status")
    assert invoke("down") == "down\n"
    assert invoke("down") == "already down\n"


def test_missing_programs_name_the_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(programs, "_EXTRA_PATH", ())
    with pytest.raises(UserError, match=r"apt-get install .*munge slurm-client slurmctld slurmd$"):
        LocalCluster(tmp_path / "cluster").up()
    assert not (tmp_path / "cluster").exists()


def test_another_system_is_shown_another_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UserError, match=r"needs Linux, not darwin; .*--launcher process"):
        LocalCluster(tmp_path / "cluster").up()


def test_binding_to_a_dead_process_is_refused(own: LocalCluster) -> None:
    ended = start_python("")
    ended.wait()
    with pytest.raises(UserError, match=f"no process {ended.pid}"):
        own.up(bound_to=ended.pid)


def test_default_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HYPERPOD_FT_LOCAL", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert default_directory() == Path("/state/hyperpod-ft/local")
    monkeypatch.setenv("HYPERPOD_FT_LOCAL", "/elsewhere")
    assert default_directory() == Path("/elsewhere")


def test_port_blocks_are_exclusive_and_skip_a_taken_port() -> None:
    one, two = reserve_ports(3), reserve_ports(3)
    with one.lock, two.lock:
        assert abs(one.first - two.first) >= BLOCK
        with socket.create_server(("127.0.0.1", two.first + 2)):
            two.lock.close()
            three = reserve_ports(3)
            three.lock.close()
            assert three.first != two.first


def test_conf_suits_the_version() -> None:
    spec = ClusterSpec(nodes=2, cpus=4, memory_mb=100, first_port=17000, first_job_id=1, slurm_version="22.05.8")
    text = render_slurm_conf(spec, Path("/tmp/x"), "someone", "host")
    assert "NodeName=node2 NodeHostname=host NodeAddr=127.0.0.1 Port=17002 CPUs=4 RealMemory=100 State=UNKNOWN" in text
    assert "/none" not in text
    assert render_cgroup_conf((23, 11)) == "CgroupPlugin=cgroup/v1\n"
    assert render_cgroup_conf((24, 5)) == "CgroupPlugin=disabled\n"
