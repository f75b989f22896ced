"""What `cluster update` backs up on a controller before patching, and that the documented commands restore it."""

import base64
import re
import shlex
from pathlib import Path

import pytest

from tests.lifecycle.cluster import USER, Cluster
from tests.lifecycle.instances import CONTROLLER, WORKERS
from tests.lifecycle.nodes import container
from tests.waiting import wait_for

pytestmark = pytest.mark.lifecycle

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "hyperpod_ft" / "cluster" / "back_up_slurm.sh"
PAGE = ROOT / "docs" / "cluster-day-two.md"


def restore_commands(backup: str, state: str) -> str:
    """Those of the page, for this backup and this StateSaveLocation."""
    (block,) = re.findall(
        r"```sh\nsudo -i .*?\n(cd /fsx/\.provision/backups/TIME\n.*?)```", PAGE.read_text(), re.DOTALL
    )
    assert "var/spool/slurmctld" in block
    return str(block).replace("/fsx/.provision/backups/TIME", backup).replace("var/spool/slurmctld", state.lstrip("/"))


def accounted(cluster: Cluster, number: int) -> str:
    words = ("sacct", "-n", "-P", "-X", "-j", str(number), "-o", "user,state")

    def completed() -> str:
        shown = cluster.controller.run(*words, check=False).stdout
        return shown.strip() if "COMPLETED" in shown else ""

    return wait_for(completed, 300, every=0.2)


def test_queue_and_accounting_survive_a_new_root_volume(
    nodes_possible: None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with container(tmp_path_factory.mktemp("container")) as opened:
        logs = tmp_path_factory.mktemp("logs")
        cluster = Cluster(opened, [CONTROLLER, WORKERS[0]], logs, accounting=True)
        cluster.provision(cluster.nodes, meanwhile=cluster.write_slurm_conf)
        controller = cluster.controller
        done = cluster.submit(controller, "true")
        assert cluster.wait_for_job(done) == "COMPLETED"
        held = cluster.submit(controller, "true", "--hold")
        assert accounted(cluster, done) == f"{USER}|COMPLETED"

        script = base64.b64encode(SCRIPT.read_bytes()).decode()
        said = controller.run("sh", "-c", f"echo {script} | base64 -d | sh -s -- /fsx").stdout
        found = re.search(r"hyperpod-ft-backup: queue, configuration and accounting in (\S+)", said)
        assert found, said
        mode = controller.run("stat", "-c", "%a %U", found[1]).stdout.strip()
        assert mode == "700 root", "the configuration holds the password of the database"

        # what a new image does to the queue and the jobs of the accounting database
        shown = controller.run("scontrol", "show", "config").stdout
        state = next(line for line in shown.splitlines() if line.startswith("StateSaveLocation")).partition("= ")[2]
        controller.run("systemctl", "stop", "slurmctld", "slurmdbd")
        controller.run("sh", "-c", f"rm -rf {shlex.quote(state)}/*")
        controller.run("mysql", "--execute", "DROP DATABASE slurm_acct_db")

        controller.run("sh", "-ec", restore_commands(found[1], state))

        wait_for(lambda: " UP" in controller.run("scontrol", "ping", check=False).stdout, 300, every=0.2)
        assert "JobState=PENDING" in controller.run("scontrol", "show", "job", str(held)).stdout
        assert accounted(cluster, done) == f"{USER}|COMPLETED"
        assert cluster.submit(controller, "true", "--hold") > held, "no number is given twice"
