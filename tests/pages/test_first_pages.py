"""README, docs/preferences.md, docs/flan-t5.md and docs/on-a-cluster.md, typed as they stand.

Genuine: all commands, a Slurm, the training. README's quickstart is run in whole, in a copy of the checkout; on the
other pages a wrapper shortens what is submitted. docs/on-a-cluster.md's part about an existing cluster runs on a
cluster's nodes: tests/lifecycle/test_cluster_page.py.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages.blocks import ROOT, blocks, run_blocks, stand_in

pytestmark = [pytest.mark.slurm, pytest.mark.training, pytest.mark.timeout(900)]

KIT = Path(sys.executable).with_name("hyperpod-ft")
# what README's tests and rehearsals do, other tests do: this suite is one, tests/aws/test_rehearsals.py has the others
NOT_HERE = re.compile(r"^\./scripts/(test|rehearse-\w+)\.sh$", re.MULTILINE)


def environment(directory: Path) -> dict[str, str]:
    """Of a user whose home is `directory`, with programs of `directory`/bin before all others."""
    own = {
        "HOME": str(directory),
        "XDG_STATE_HOME": str(directory / "state"),
        "HYPERPOD_FT_LOCAL": str(directory / "slurm"),
        "PATH": os.pathsep.join([str(directory / "bin"), str(KIT.parent), os.environ["PATH"]]),
    }
    return os.environ | own


def shorten(directory: Path, *options: str) -> None:
    """Add options to each `submit`."""
    stand_in(
        directory / "bin",
        "hyperpod-ft",
        f'[[ $1 != submit ]] || set -- "$@" {" ".join(options)}\nexec {KIT} "$@"',
    )


def test_readme_from_the_clone_to_the_tuned_model(tmp_path: Path) -> None:
    """The quickstart learns what README says: it answers requests that it never saw."""
    checkout = tmp_path / "hyperpod-ft"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, checkout / name)
    # setting up .venv was the first thing that scripts/test.sh did
    (checkout / ".venv").mkdir()
    for name in ("bin", "lib", "pyvenv.cfg"):
        (checkout / ".venv" / name).symlink_to(ROOT / ".venv" / name)
    stamp = subprocess.run(
        ["bash", "-c", "cat pyproject.toml constraints.txt <(printf '%s' \"$PWD\") | cksum"],
        cwd=checkout,
        capture_output=True,
        text=True,
        check=True,
    )
    (checkout / ".venv" / ".setup-torch").write_text(stamp.stdout)
    found = [block for block in blocks("README.md") if not NOT_HERE.match(block)]
    try:
        quickstart, used = run_blocks("README.md", found, checkout, environment(tmp_path), timeout=800)
    finally:
        subprocess.run([KIT, "local", "down"], env=environment(tmp_path), check=False, capture_output=True)
    counts = re.findall(r"unseen (.+): base (\d+)/32, tuned (\d+)/32", quickstart)
    assert [kind for kind, *_ in counts] == ["pairs of values", "phrasings"], quickstart
    for _, base, tuned in counts:
        # README quotes what was seen on one processor; another one rounds differently
        assert int(base) == 0 and int(tuned) >= 0.6 * 32, quickstart
    assert "Done, and the private Slurm is stopped" in quickstart
    assert "Nothing to submit" in used, "the same run file"
    assert (checkout / "report.html").stat().st_size > 10_000


def test_preferences(tmp_path: Path) -> None:
    shorten(tmp_path, "--launcher process --set training.max_steps=2 --set cluster.nodes=1")
    first, after = run_blocks("docs/preferences.md", blocks("docs/preferences.md"), tmp_path, environment(tmp_path))
    assert "p5.48xlarge" in first
    assert after.count("merged") >= 2
    trained = [json.loads(path.read_text()) for path in tmp_path.glob(".quickstart/runs/*/*/records/train.json")]
    assert len(trained) == 3


def test_flan_t5(tmp_path: Path) -> None:
    (shown,) = run_blocks("docs/flan-t5.md", blocks("docs/flan-t5.md"), tmp_path, environment(tmp_path))
    assert re.search(r"^train +", shown, re.MULTILINE), shown
    assert (tmp_path / "xxl.yaml").exists()


def test_a_real_slurm_on_one_machine(tmp_path: Path) -> None:
    shorten(
        tmp_path, "--set training.max_steps=2 --set parallelism.tensor_parallel=1 --set parallelism.ranks_per_node=1"
    )
    page = "docs/on-a-cluster.md"
    up, down = run_blocks(page, blocks(page, heading="A real Slurm on one machine"), tmp_path, environment(tmp_path))
    assert re.search(r"generate +done", up), up
    assert "node2" in up
    assert not list((tmp_path / "slurm").glob("*.pid")), down
