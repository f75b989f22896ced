"""A local cluster is a real Slurm, and leaves nothing behind, however it or its starter ends."""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

import hyperpod_ft
from hyperpod_ft.cli import local
from hyperpod_ft.errors import UserError
from hyperpod_ft.localcluster import LocalCluster, default_directory, programs
from hyperpod_ft.localcluster.ports import BLOCK, reserve_ports
from hyperpod_ft.localcluster.slurm_conf import ClusterSpec, render_cgroup_conf, render_slurm_conf
from hyperpod_ft.processes import ProcessIdentity, descendants

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(120)]

# Leaves its session and its parent, as a daemon does, and says which process it became.
ESCAPEE = "setsid sh -c 'sleep 300 & echo $! > \"$0\"' {file} </dev/null >/dev/null 2>&1 &"


def run(cluster: LocalCluster, *argv: str, cwd: Path | None = None) -> str:
    """A Slurm client's output; it must succeed within 20 s."""
    return subprocess.run(
        ["timeout", "20", *argv],
        env={**os.environ, **cluster.environment()},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout


def start_python(code: str, *arguments: object) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], stdin=subprocess.DEVNULL)


def wait_until(holds: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def job_state(cluster: LocalCluster, job: str) -> str:
    fields = run(cluster, "scontrol", "show", "job", "-o", job).split()
    return next(field.partition("=")[2] for field in fields if field.startswith("JobState="))


def processes_of(cluster: LocalCluster) -> list[str]:
    """Every process with the cluster's SLURM_CONF: watch, guards, daemons, step daemons, tasks, escapees."""
    setting = f"SLURM_CONF={cluster.conf}\0".encode()
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if setting in (directory / "environ").read_bytes():
                found.append(f"{directory.name} {(directory / 'comm').read_text().strip()}")
        except OSError:
            continue
    return found


def is_unlocked(cluster: LocalCluster) -> bool:
    """Whether no starter, watch or guard holds the cluster's lock, not even one that was just forked."""
    lock = cluster._runtime.try_lock()
    if lock:
        lock.close()
    return lock is not None


def assert_gone(cluster: LocalCluster) -> None:
    assert processes_of(cluster) == []
    assert not cluster.conf.parent.exists()
    assert not cluster.status().running


def submit_escaping_job(cluster: LocalCluster, directory: Path) -> ProcessIdentity:
    """Start a job on two nodes, one process of which escapes its session and parent. Returns that process."""
    file = directory / "escapee"
    script = f"{ESCAPEE.format(file=file)} srun -N2 sleep 300 & wait"
    run(cluster, "sbatch", "-N2", "-o", str(directory / "out"), "--wrap", script, cwd=directory)
    wait_until(lambda: file.exists() and file.read_text().endswith("\n"))
    wait_until(lambda: sum(" sleep" in process for process in processes_of(cluster)) == 3)
    identity = ProcessIdentity.of(int(file.read_text()))
    assert identity is not None
    return identity


@pytest.fixture
def own(slurm_installed: None, tmp_path: Path) -> Iterator[LocalCluster]:
    """A cluster of the test's own, not yet up."""
    cluster = LocalCluster(tmp_path / "cluster")
    yield cluster
    cluster.down()


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
            assert all(pool.map(lambda cluster: cluster.up(nodes=1, bound_to_parent=True), clusters))
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


def test_srun_reaches_every_node(cluster: LocalCluster) -> None:
    names = run(cluster, "srun", "-N2", "--ntasks-per-node=4", "printenv", "SLURMD_NODENAME")
    assert sorted(names.split()) == ["node1"] * 4 + ["node2"] * 4


def test_chain_runs_in_order(cluster: LocalCluster, tmp_path: Path) -> None:
    def sbatch(command: str, *options: str) -> str:
        arguments = ("--parsable", "-o", "out", "--open-mode=append", *options, "--wrap", command)
        return run(cluster, "sbatch", *arguments, cwd=tmp_path).strip()

    first = sbatch("sleep 0.3; echo first")
    second = sbatch("echo second", f"--dependency=afterok:{first}")
    failed = sbatch("exit 3", f"--dependency=afterok:{second}")
    never = sbatch("echo never", f"--dependency=afterok:{failed}", "--kill-on-invalid-dep=yes")
    wait_until(lambda: job_state(cluster, never) == "CANCELLED")
    assert job_state(cluster, failed) == "FAILED"
    assert (tmp_path / "out").read_text() == "first\nsecond\n"


def test_node_loss_requeues_the_job_or_fails_it(cluster: LocalCluster, tmp_path: Path) -> None:
    def sbatch(option: str, out: str) -> str:
        script = 'echo attempt ${SLURM_RESTART_COUNT:-0}; [ -n "$SLURM_RESTART_COUNT" ] || srun sleep 300'
        arguments = ("--parsable", "-N2", "-o", out, "--open-mode=append", option, "--wrap", script)
        return run(cluster, "sbatch", *arguments, cwd=tmp_path).strip()

    again, lost = sbatch("--requeue", "again"), sbatch("--no-requeue", "lost")
    wait_until(lambda: sum(" sleep" in process for process in processes_of(cluster)) == 4)
    cluster.kill_node("node2")
    try:
        assert ("node2", "down") in [(name, state.rstrip("*")) for name, state in cluster.status().nodes]
        wait_until(lambda: job_state(cluster, lost) == "NODE_FAIL", seconds=5)
        wait_until(lambda: job_state(cluster, again) == "PENDING", seconds=5)
    finally:
        cluster.start_node("node2")
    wait_until(lambda: job_state(cluster, again) == "COMPLETED")
    assert (tmp_path / "again").read_text().split("\n")[-2] == "attempt 1"
    wait_until(lambda: [state for _, state in cluster.status().nodes] == ["idle", "idle"])
    with pytest.raises(UserError, match=r"no node 'node3' in this local cluster; .*node1, node2"):
        cluster.kill_node("node3")


def test_jobs_outlive_daemons_that_are_killed(cluster: LocalCluster, tmp_path: Path) -> None:
    ended = tmp_path / "ended"
    script = f"while [ ! -e {ended} ]; do sleep 0.1; done; echo done"
    job = run(cluster, "sbatch", "--parsable", "-o", "out", "--wrap", script, cwd=tmp_path).strip()
    wait_until(lambda: job_state(cluster, job) == "RUNNING")
    node = run(cluster, "squeue", "-h", "-o", "%N", "-j", job).strip()
    slurmds = {process for process in processes_of(cluster) if process.endswith(" slurmd")}
    cluster.restart_slurmd(node)
    wait_until(lambda: len(slurmds - set(processes_of(cluster))) == 1)
    ended.touch()
    wait_until(lambda: job_state(cluster, job) == "COMPLETED")
    assert (tmp_path / "out").read_text() == "done\n"

    cluster.kill_controller()
    assert not any(process.endswith(" slurmctld") for process in processes_of(cluster))
    cluster.start_controller()
    # Slurm saves its state every few seconds: it may have forgotten that the job has run, or that there was one
    again = run(cluster, "sbatch", "--parsable", "-o", "again", "--wrap", "echo done", cwd=tmp_path).strip()
    wait_until(lambda: job_state(cluster, again) == "COMPLETED")
    assert (tmp_path / "again").read_text() == "done\n"


def test_killed_node_loses_every_process_and_no_other_does(own: LocalCluster) -> None:
    own.up()
    escapee = submit_escaping_job(own, own.directory)  # the batch script runs on node1
    own.kill_node("node2")
    assert escapee.is_alive()
    own.kill_node("node1")
    assert not escapee.is_alive()
    assert not any(" sleep" in process or "slurmd" in process for process in processes_of(own))
    own.start_node("node1")
    own.start_node("node2")
    assert run(own, "srun", "-N2", "echo", "back") == "back\nback\n"


def test_down_kills_job_processes_that_escaped(own: LocalCluster) -> None:
    own.up()
    escapee = submit_escaping_job(own, own.directory)
    assert own.down()
    assert not escapee.is_alive()
    assert_gone(own)


def test_daemon_watch_killed_leaves_nothing(own: LocalCluster) -> None:
    own.up()
    escapee = submit_escaping_job(own, own.directory)
    os.kill(own.status().pid or 0, signal.SIGKILL)
    wait_until(lambda: processes_of(own) == [], seconds=10)
    assert not escapee.is_alive()
    assert not own.status().running
    assert own.up()
    assert run(own, "squeue", "-h") == ""


def test_guard_killed_leaves_nothing_on_its_node(own: LocalCluster) -> None:
    own.up()
    escapee = submit_escaping_job(own, own.directory)
    slurmd = next(
        pid
        for pid in descendants(own.status().pid or 0)
        if Path(f"/proc/{pid}/cmdline").read_bytes().endswith(b"/slurmd\0-D\0-N\0node1\0")
    )
    guard = int(Path(f"/proc/{slurmd}/stat").read_text().split()[3])
    os.kill(guard, signal.SIGKILL)
    wait_until(lambda: not escapee.is_alive(), seconds=10)
    wait_until(lambda: not Path(f"/proc/{slurmd}").exists())
    own.start_node("node1")
    assert run(own, "srun", "-w", "node1", "echo", "back") == "back\n"


def test_everything_of_ours_killed_at_once_is_cleaned_by_the_next_up(own: LocalCluster) -> None:
    own.up()
    escapee = submit_escaping_job(own, own.directory)
    watch = own.status().pid or 0
    ours = [pid for pid in descendants(watch) if "localcluster" in Path(f"/proc/{pid}/cmdline").read_text()]
    assert len(ours) == 4  # munged, slurmctld, node1, node2
    for pid in (watch, *ours):
        os.kill(pid, signal.SIGSTOP)
    for pid in (watch, *ours):
        os.kill(pid, signal.SIGKILL)
    assert escapee.is_alive()
    assert own.up()
    assert not escapee.is_alive()
    assert not any(" sleep" in process for process in processes_of(own))


def test_controller_death_ends_the_cluster(own: LocalCluster) -> None:
    own.up(nodes=1)
    pid = int((own.conf.parent / "slurmctld.pid").read_text())
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: processes_of(own) == [], seconds=10)
    assert "slurmctld ended" in (own.logs / "daemons.log").read_text()


def test_runtime_directory_removed_ends_the_cluster(own: LocalCluster) -> None:
    own.up(nodes=1)
    shutil.rmtree(own.conf.parent, ignore_errors=True)
    wait_until(lambda: processes_of(own) == [], seconds=10)


def test_bound_cluster_ends_with_its_killed_starter(own: LocalCluster) -> None:
    code = """if True:
        import sys, time
        from pathlib import Path
        from hyperpod_ft.localcluster import LocalCluster
        LocalCluster(Path(sys.argv[1])).up(bound_to_parent=True)
        time.sleep(300)"""
    starter = start_python(code, own.directory)
    wait_until(lambda: (own.status().running and own.status().nodes[1].state == "idle") or starter.poll())
    escapee = submit_escaping_job(own, own.directory)
    starter.kill()
    starter.wait()
    wait_until(lambda: processes_of(own) == [], seconds=10)
    assert not escapee.is_alive()
    assert_gone(own)


def test_unbound_cluster_outlives_its_starter(own: LocalCluster) -> None:
    code = "import sys, pathlib, hyperpod_ft.localcluster as l; l.LocalCluster(pathlib.Path(sys.argv[1])).up(nodes=1)"
    assert start_python(code, own.directory).wait() == 0
    time.sleep(0.5)
    assert own.status().nodes == (("node1", "idle"),)


@pytest.mark.parametrize("with_signal", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("moment", ["daemons.log", "munged.out", "slurmctld.log"])
def test_starter_stopped_during_up_leaves_nothing(own: LocalCluster, with_signal: signal.Signals, moment: str) -> None:
    code = """if True:
        import sys
        from pathlib import Path
        from hyperpod_ft.localcluster import LocalCluster
        LocalCluster._node_states = lambda *_: {}  # no node is ever idle: `up` does not end before the signal
        LocalCluster(Path(sys.argv[1])).up(nodes=1)"""
    starter = start_python(code, own.directory)
    wait_until((own.logs / moment).exists, seconds=50)
    starter.send_signal(with_signal)
    assert starter.wait() != 0
    wait_until(lambda: is_unlocked(own), seconds=50)
    assert processes_of(own) == []
    assert own.down() is False
    assert_gone(own)


def test_any_directory_name_will_do(slurm_installed: None, tmp_path: Path) -> None:
    directory = tmp_path / "a, b=c # ü" / ("long" * 30)
    cluster = LocalCluster(directory)
    try:
        cluster.up(bound_to_parent=True)
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
    shutil.copytree(Path(hyperpod_ft.__file__).parent, open_directory / "hyperpod_ft")
    os.chown(home, user.pw_uid, user.pw_gid)
    code = """if True:
        import os, subprocess
        from hyperpod_ft.localcluster import LocalCluster, default_directory
        cluster = LocalCluster(default_directory())
        cluster.up()
        argv = ["timeout", "20", "srun", "-N2", "id", "-un"]
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
        timeout=60,
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
        own.up(bound_to_pid=ended.pid)


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
        two.lock.close()
        with socket.create_server(("127.0.0.1", two.first + 2)):
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
