"""README, docs/first-run-cpus.md, first-run-gpu.md, methods.md, models.md and CONTRIBUTING.md, typed as they stand.

Genuine: all commands, a Slurm, the training. README's quickstart is run in whole, in a copy of the checkout. The other
pages start from its finished run, and a wrapper shortens what some submit. The first run on Slurm, and the installation
of both pages with accelerators, have nodes of their own: tests/lifecycle/test_cluster_page.py.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.pages.blocks import ROOT, blocks, run_blocks
from tests.pages.reader import BIN, CURL, EDITOR, clone, environment
from tests.programs import write_program

pytestmark = [pytest.mark.slurm, pytest.mark.training, pytest.mark.timeout(900)]

KIT = BIN / "hyperpod-ft"


def reader(home: Path) -> dict[str, str]:
    return environment(home, HYPERPOD_FT_LOCAL=str(home / "slurm"))


def shorten(home: Path, submit: str) -> None:
    """Run these lines of bash before each `submit`, whose arguments are $@."""
    write_program(home / "bin" / "hyperpod-ft", f'if [[ $1 == submit ]]; then\n{submit}\nfi\nexec {KIT} "$@"')


@pytest.fixture(scope="module")
def readme(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A copy of the checkout in which README's blocks were typed, but for those of a cluster, and what they printed."""
    home = tmp_path_factory.mktemp("reader")
    checkout = home / "hyperpod-ft"
    clone(checkout)
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
    try:
        return checkout, run_blocks("README.md", blocks("README.md")[1:], checkout, reader(home), timeout=800)
    finally:
        subprocess.run([KIT, "local", "down"], env=reader(home), check=False, capture_output=True)


@pytest.fixture
def runs(readme: tuple[Path, list[str]], tmp_path: Path) -> Path:
    """A directory of the test's own that has the finished quickstart, as the readers of other pages do."""
    shutil.copytree(readme[0] / ".quickstart", tmp_path / ".quickstart")
    return tmp_path


def test_readme_from_the_clone_to_the_tuned_model(readme: tuple[Path, list[str]]) -> None:
    """The quickstart learns what README says: it answers requests that it never saw."""
    checkout, (quickstart, used) = readme
    counts = re.findall(r"unseen (.+): base (\d+)/32, tuned (\d+)/32", quickstart)
    assert [kind for kind, *_ in counts] == ["pairs of values", "phrasings"], quickstart
    # with four ways to round, as processors differ, all of 32 and 29 to 31 were seen
    for (_, base, tuned), least in zip(counts, (0.9, 0.8), strict=True):
        assert int(base) == 0 and int(tuned) >= least * 32, quickstart
    assert "Done, and the private Slurm is stopped" in quickstart
    assert "\n--time=00:45:00\n" in f"\n{used}", used
    (record,) = checkout.glob(".quickstart/runs/quickstart/*/records/train.json")
    facts = json.loads(record.read_text())["facts"]
    assert (facts["tensor_parallel"], facts["data_parallel"], facts["world_size"]) == (2, 2, 4)
    assert (checkout / "report.html").stat().st_size > 10_000


def test_first_run_on_cpus(readme: tuple[Path, list[str]]) -> None:
    """From README's quickstart, which is the page's first step too."""
    checkout, (printed, _) = readme
    assert "Next: docs/first-run-cpus.md, from its step 2" in printed
    (checkout / "report.html").unlink()
    page = "docs/first-run-cpus.md"
    quickstart, *found = blocks(page)
    assert quickstart.endswith(blocks("README.md")[1])
    _, written, shown, trained, used = run_blocks(page, found, checkout, reader(checkout.parent))
    assert "Wrote run.yaml" in written
    assert re.search(r"^\+ completion .*me *$", shown, re.MULTILINE), shown
    assert re.search(r"^train +run", shown, re.MULTILINE), shown
    assert "exact answers, train rows: base 0/2, tuned 2/2" in trained, trained
    assert used.startswith("scancel 42\n"), used
    assert (checkout / "report.html").stat().st_size > 10_000


def test_first_run_on_one_machine(runs: Path) -> None:
    """Model and instance type of the submitted run are others; its answers are asked for on the page before."""
    page = "docs/first-run-gpu.md"
    _, get, init, edit, train, use = blocks(page)
    small = "cluster.instance_type=local", f"cluster.root={runs}/.quickstart", "env.python=current"
    small += "model.source=example:tiny-llama", "dataset.max_length=128", "dataset.overlong=truncate"
    small += "training.max_steps=2", "training.precision=fp32", "parallelism.ranks_per_node=1"
    small += "generate.max_new_tokens=8", "generate.validation_samples=2", "generate.train_samples=2"
    shorten(runs, f'set -- "$@" {" ".join(f"--set {change}" for change in small)}')
    for name, program in (("curl", CURL), ("editor", EDITOR)):
        write_program(runs / "bin" / name, program)
    (typed,) = blocks(page, "yaml")
    shell = reader(runs) | {"EDITOR": "editor", "TYPED": typed}
    use = use.partition("hyperpod-ft ask")[0]
    _, written, _, trained, used = run_blocks(page, [get, init, edit, train, use], runs, shell)
    assert "Wrote run.yaml" in written
    assert re.search(r"^ranks +1 x g5.xlarge", trained, re.MULTILINE), trained
    assert re.search(r"^train +run", trained, re.MULTILINE), trained
    assert re.search(r"generate +done", trained), trained
    assert "answers by pattern" in used, used
    assert (runs / "first-run" / "report.html").stat().st_size > 10_000


def test_preferences(runs: Path) -> None:
    small = "--set training.max_steps=2 --set parallelism.ranks_per_node=1 --set generate.max_new_tokens=4"
    shorten(runs, f'[[ $2 != quickstart-dpo ]] || set -- "$@" {small}')
    found = blocks("docs/methods.md", heading="Preferences: DPO")
    first, after = run_blocks("docs/methods.md", found, runs, reader(runs))
    assert "Wrote dpo.yaml" in first and "p5.48xlarge" in (runs / "dpo.yaml").read_text(encoding="utf-8")
    assert "Nothing to submit" in after
    assert after.count("merged") >= 2
    trained = [json.loads(path.read_text()) for path in runs.glob(".quickstart/runs/*/*/records/train.json")]
    assert len(trained) == 3


def test_flan_t5(tmp_path: Path) -> None:
    found = blocks("docs/models.md", heading="Flan-T5 and T5")
    (shown,) = run_blocks("docs/models.md", found, tmp_path, reader(tmp_path))
    assert re.search(r"^train +", shown, re.MULTILINE), shown
    assert (tmp_path / "xxl.yaml").exists()


def test_a_real_slurm_on_one_machine(runs: Path) -> None:
    """Only the answers are new."""
    shorten(runs, 'set -- "$@" --set generate.validation_samples=2')
    page = "CONTRIBUTING.md"
    found = blocks(page, heading="A real Slurm on one machine")
    up, down = run_blocks(page, found, runs, reader(runs))
    assert re.search(r"generate +done", up), up
    assert "node2" in up
    assert not list((runs / "slurm").glob("*.pid")), down
