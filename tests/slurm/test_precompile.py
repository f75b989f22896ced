"""Stage precompile on two nodes of a real Slurm: `srun` under the stage program, one torchrun a node.

`neuron_parallel_compile` and the engine are stand-ins, see tests/neuron_stand_ins.py.
"""

import json
from pathlib import Path

import pytest

from hyperpod_ft.localcluster import LocalCluster
from tests import neuron_stand_ins
from tests.conftest import MakeRun
from tests.slurm.local_clusters import run as slurm
from tests.waiting import wait_for

pytestmark = pytest.mark.slurm


def test_every_node_traces_and_the_first_records(cluster: LocalCluster, make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(
        engine="neuron",
        cluster__instance_type="trn1.32xlarge",
        cluster__nodes=2,
        cluster__time_limit="5",
        parallelism={"ranks_per_node": 1, "tensor_parallel": 1},
        env__python=str(neuron_stand_ins.environment(tmp_path / "venv")),
    )
    neuron_stand_ins.ready_for_precompile(run)
    # not `sbatch --wait`: it asks after 2, 10, then 42 s
    job = slurm(cluster, "sbatch", "--parsable", str(run.paths.script("precompile"))).strip()
    wait_for(lambda: not slurm(cluster, "squeue", "--noheader", f"--jobs={job}"), 300, every=0.2)
    log = "".join(path.read_text() for path in run.paths.logs.glob("*.out"))
    record = run.journal.record("precompile")
    assert record is not None, log
    assert record.facts["graphs"] == 2
    ranks = [json.loads((run.paths.directory / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert [(rank["WORLD_SIZE"], rank["LOCAL_RANK"]) for rank in ranks] == [("2", "0"), ("2", "0")], "one on each node"
    assert not run.paths.trial_facts.exists()
