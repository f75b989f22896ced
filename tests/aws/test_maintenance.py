"""The commands that change a running cluster, as users run them, against the server that stands in for AWS."""

import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.aws.clusters import FIRST_IMAGE, NEWEST_IMAGE
from tests.aws.kit import NAME, WORKERS, Kit
from tests.aws.ssh_nodes import install_cli
from tests.programs import write_program


def group(kit: Kit, name: str = WORKERS) -> dict[str, Any]:
    described = kit.aws.client("sagemaker").describe_cluster(ClusterName=NAME)
    (found,) = [one for one in described["InstanceGroups"] if one["InstanceGroupName"] == name]
    assert isinstance(found, dict)
    return found


def operations(kit: Kit) -> list[str]:
    return [operation for service, operation in kit.aws.requests() if service == "sagemaker"]


class Controller:
    """What the controller answers through SSM: programs that stand in for Slurm's, and a shared volume."""

    def __init__(self, kit: Kit, directory: Path) -> None:
        self.kit, self.shared = kit, directory / "fsx"
        (instance,) = [node["instance_id"] for node in kit.nodes() if node["group"] == "controller-machine"]
        self.bin = directory / "nodes" / instance / "bin"
        programs = directory / "programs"
        self.shared.mkdir()
        install_cli(programs)
        write_program(self.bin / "sudo", 'shift; exec "$@"')
        kit.environment |= {"PATH": f"{programs}:{kit.environment['PATH']}", "NODES": str(directory / "nodes")}

    def program(self, name: str, text: str) -> None:
        write_program(self.bin / name, text)

    def states(self, **states: str) -> None:
        """Slurm's states of workers by their number, 0 to 2; a node is listed once for each of its partitions."""
        hosts = [node["hostname"] for node in self.kit.nodes() if node["group"] == WORKERS]
        lines = [f"{hosts[int(number[1:])]}={state}" for number, state in states.items()]
        self.program("sinfo", "\n".join(f"echo {line}" for line in [*lines, *lines]))


@pytest.fixture
def controller(running: Kit, tmp_path: Path) -> Controller:
    return Controller(running, tmp_path)


def test_scaling_up_changes_nothing_but_the_count(running: Kit) -> None:
    """UpdateCluster would replace the group's settings by those that the kit knows of. Fifty are added at a time."""
    running.aws.scenario(quotas={"ml.trn1.32xlarge for cluster usage": 3})
    assert "ResourceLimitExceeded" in running.run("scale", NAME, WORKERS, "4", status=2)
    running.aws.scenario(quotas={"ml.trn1.32xlarge for cluster usage": 200})
    running.run("scale", NAME, WORKERS, "4")
    assert len(running.workers()) == 4
    assert "BatchAddClusterNodes" in operations(running)
    assert "UpdateCluster" not in operations(running)
    assert "4 instances already" in running.run("scale", NAME, WORKERS, "4")
    before = operations(running).count("BatchAddClusterNodes")
    running.run("scale", NAME, WORKERS, "60", "--no-wait")
    assert operations(running).count("BatchAddClusterNodes") == before + 2
    assert group(running)["TargetCount"] == 60


def test_a_node_is_rebooted_and_stays_the_same(running: Kit) -> None:
    worker, *_ = before = running.workers()
    assert "--yes" in running.run("reboot-node", NAME, worker, status=2)
    running.aws.scenario(seconds={"node.reboot": 3600})
    command = running.start("reboot-node", NAME, worker, "--yes")
    command.wait_for(f"{worker}: Pending")
    running.aws.scenario(seconds={"node.reboot": 0})
    assert f"{worker}: Running" in command.finish(), "it waits"
    assert running.workers() == before
    assert "BatchRebootClusterNodes" in operations(running)
    assert "no node 'i-1'" in running.run("reboot-node", NAME, "i-1", "--yes", status=2)


def test_named_nodes_are_deleted_the_group_gets_smaller_and_is_deleted(running: Kit) -> None:
    first, second, third = running.workers()
    assert "--yes" in running.run("delete-node", NAME, first, status=2)
    hosts = {node["instance_id"]: node["hostname"] for node in running.nodes()}
    after = running.run("delete-node", NAME, first, hosts[third], "--yes", "--json")
    assert running.workers() == [second]
    assert group(running)["TargetCount"] == 1
    assert json.loads(after[after.index("{") :])["complete"]
    assert "with its 1 instance" in running.run("delete-group", NAME, WORKERS, status=2)
    running.run("delete-group", NAME, WORKERS, "--yes")
    assert [found["name"] for found in running.json("status")["groups"]] == ["controller-machine"]
    assert f"no instance group '{WORKERS}'" in running.run("delete-group", NAME, WORKERS, "--yes", status=2)


def test_the_controller_is_neither_scaled_nor_deleted_nor_patched_automatically(running: Kit) -> None:
    (node,) = [one["instance_id"] for one in running.nodes() if one["group"] == "controller-machine"]
    for command in (
        *(["scale", NAME, "controller-machine", count] for count in ("0", "2")),
        ["delete-node", NAME, node],
        ["delete-group", NAME, "controller-machine"],
        ["auto-patch", NAME, "WhenIdle", "--group", "controller-machine"],
    ):
        assert "controller-machine is the controller group" in running.run(*command, "--yes", status=2)
    assert group(running, "controller-machine")["TargetCount"] == 1


def test_which_nodes_to_delete_must_be_said_in_one_way(running: Kit) -> None:
    for arguments in ([], ["--group", WORKERS], ["--count", "1"], ["i-1", "--group", WORKERS, "--count", "1"]):
        assert "which nodes?" in running.run("delete-node", NAME, *arguments, status=2)


def test_nodes_that_run_no_job_are_chosen(controller: Controller) -> None:
    kit = controller.kit
    first, second, third = kit.workers()
    controller.states(_0="allocated", _1="idle", _2="down*")
    chosen = ["delete-node", NAME, "--group", WORKERS, "--count"]
    refusal = kit.run(*chosen, "3", "--yes", status=2)
    assert "2 of its nodes run no job, not 3" in refusal
    assert f"{first} (allocated)" in refusal
    assert kit.workers() == [first, second, third]
    kit.run(*chosen, "1", "--yes")
    assert kit.workers() == [first, second], "the one that Slurm cannot use goes first"
    kit.aws.scenario(seconds={"node.shutdown.shown": 3600})
    kit.run(*chosen, "1", "--yes", "--no-wait")
    assert kit.workers() == [first, second], "not yet shown"
    assert "HyperPod is removing 1 of its 2 nodes" in kit.run(*chosen, "1", "--yes", status=2)
    assert operations(kit).count("BatchDeleteClusterNodes") == 2


def test_without_an_answer_of_slurm_no_node_is_chosen(controller: Controller) -> None:
    controller.program("sinfo", "echo slurm_load_partitions: Unable to contact slurm controller >&2; exit 1")
    before = controller.kit.workers()
    arguments = ["delete-node", NAME, "--group", WORKERS, "--count", "1", "--yes"]
    assert "Unable to contact slurm controller" in controller.kit.run(*arguments, status=2)
    controller.states()
    assert "unknown to Slurm" in controller.kit.run(*arguments, status=2)
    assert controller.kit.workers() == before


def test_other_groups_are_not_offered_for_a_controller_that_is_not_running(controller: Controller) -> None:
    """Another group could be deleted from, or patched, but not asked about jobs."""
    kit = controller.kit
    kit.aws.scenario(seconds={"node.reboot": 3600})
    kit.run("reboot-node", NAME, controller.bin.parent.name, "--yes", "--no-wait")
    chosen = kit.run("delete-node", NAME, "--group", WORKERS, "--count", "1", "--yes", status=2)
    assert "the controller is not Running (1 Pending); wait until it is, or name the nodes to delete" in chosen
    patched = kit.run("update", NAME, "--yes", status=2)
    assert "the controller is not Running (1 Pending); wait until it is, or pass --no-backup" in patched


def test_node_recovery_is_changed(running: Kit) -> None:
    assert "--yes" in running.run("node-recovery", NAME, "None", status=2)
    for mode, *yes in (("None", "--yes"), ("Automatic",)):
        running.run("node-recovery", NAME, mode, *yes)
        assert running.aws.client("sagemaker").describe_cluster(ClusterName=NAME)["NodeRecovery"] == mode


def test_automatic_patching_of_the_workers_is_set_and_kept(running: Kit) -> None:
    running.run("auto-patch", NAME, "WhenIdle", "--yes")
    assert group(running)["AutoPatchConfig"]["PatchingStrategy"] == "WhenIdle"
    assert "AutoPatchConfig" not in group(running, "controller-machine")
    running.run("scale", NAME, WORKERS, "2", "--yes")
    assert group(running)["AutoPatchConfig"]["PatchingStrategy"] == "WhenIdle", "an update of the group keeps it"


def test_workers_get_the_newest_image_once(running: Kit) -> None:
    running.aws.scenario(seconds={"node.update": 0.2})
    output = running.run("update", NAME, "--group", WORKERS, status=2)
    assert "root volumes" in output
    assert "Slurm's queue" not in output
    before = running.workers()
    output = running.run("update", NAME, "--group", WORKERS, "--yes")
    assert f"software update Succeeded, 3 of 3 have image {NEWEST_IMAGE}" in output
    assert (group(running)["CurrentImageReleaseVersion"], running.workers()) == (NEWEST_IMAGE, before)
    assert group(running, "controller-machine")["CurrentImageReleaseVersion"] == FIRST_IMAGE
    assert "updates nothing" in running.run("update", NAME, "--group", WORKERS, "--yes")


def test_a_custom_image_and_a_release(running: Kit) -> None:
    running.aws.scenario(seconds={"node.update": 0.1})
    update = ["update", NAME, "--group", WORKERS, "--yes"]
    running.run(*update, "--image", "ami-0123456789abcdef0")
    assert group(running)["CurrentImageId"] == "ami-0123456789abcdef0"
    running.run(*update, "--release", "1.4.2")
    assert group(running)["CurrentImageReleaseVersion"] == "1.4.2"
    asked = len(running.aws.requests())
    assert "--image: 'ami-x'" in running.run(*update, "--image", "ami-x", status=2)
    assert "--release: 'newest'" in running.run(*update, "--release", "newest", status=2)
    assert "exclude each other" in running.run(*update, "--release", "1.4.2", "--image", "default", status=2)
    assert "UpdateClusterSoftware" not in [operation for _, operation in running.aws.requests()[asked:]]


def test_an_update_that_fails_is_reported(running: Kit) -> None:
    lines = {"lines": ["error: fsx: no answer"], "exit": 1, "times": 1}
    running.aws.scenario(seconds={"node.update": 0.1}, lifecycle={WORKERS: lines})
    output = running.run("update", NAME, "--group", WORKERS, "--yes", status=2)
    assert f"{WORKERS} not updated: Lifecycle scripts did not run successfully" in output


def test_a_controller_is_backed_up_before_it_is_patched(controller: Controller) -> None:
    """Slurm's state and configuration and the accounting database, on the shared volume, for root alone."""
    kit, root = controller.kit, controller.bin.parent
    kit.configure(fsx={"mount_path": str(controller.shared)})
    state, etc = root / "spool", root / "etc"
    for directory in (state, etc):
        directory.mkdir()
    (state / "job_state").write_text("queue")
    (etc / "slurm.conf").write_text("ClusterName=c\n")
    (etc / "slurmdbd.conf").write_text("StorageHost=localhost\nStorageLoc=jobs_of_c\nStoragePass=secret\n")
    settings = {
        "AccountingStorageType": "accounting_storage/slurmdbd",
        "SLURM_CONF": etc / "slurm.conf",
        "StateSaveLocation": state,
    }
    controller.program("scontrol", "\n".join(f"echo '{key.ljust(24)}= {value}'" for key, value in settings.items()))
    controller.program("mysqldump", 'echo "dump of $*"')
    controller.program("sleep", "exit")
    output = kit.run("update", str(kit.file), status=2)
    assert "Slurm's queue and, unless it is external, the accounting database" in output
    output = kit.run("update", str(kit.file), "--yes", "--no-wait")
    (backup,) = controller.shared.glob(".provision/backups/*")
    assert f"backup: queue, configuration and accounting in {backup}" in output
    with tarfile.open(backup / "slurm.tar.gz") as archive:
        names = archive.getnames()
    assert str(state / "job_state")[1:] in names
    assert str(etc / "slurm.conf")[1:] in names
    dump = subprocess.run(["zcat", backup / "accounting.sql.gz"], capture_output=True, text=True, check=True)
    assert "--databases jobs_of_c" in dump.stdout
    assert {path.stat().st_mode & 0o777 for path in (backup, *backup.iterdir())} <= {0o700, 0o600}


def test_no_backup_no_update(controller: Controller) -> None:
    kit = controller.kit
    controller.program("scontrol", "echo no slurmctld >&2; exit 1")
    update = ["update", NAME, "--yes"]
    output = kit.run(*update, status=2)
    assert "no slurmctld" in output
    assert "or pass --no-backup" in output
    (controller.bin.parent / "fails").mkdir()
    (controller.bin.parent / "fails" / "1").write_text("Cannot perform start session: EOF")
    assert "no session: Cannot perform start session: EOF; run it again" in (output := kit.run(*update, status=2))
    assert "or pass --no-backup" in output
    assert "UpdateClusterSoftware" not in operations(kit)
    kit.run(*update, "--no-backup", "--no-wait")
    assert "UpdateClusterSoftware" in operations(kit)
