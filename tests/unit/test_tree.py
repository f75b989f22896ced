"""What import-linter cannot check about the tree of hyperpod_ft/."""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "hyperpod_ft"
TWO_MEANINGS = {
    # of both engines, with the same methods
    "Checkpoints",
    "TrainingLoop",
}
SLURM = {"sbatch", "squeue", "scontrol", "sacct", "scancel", "sinfo", "srun"}


def command_lines(file: Path) -> set[str]:
    """The programs that begin a list in this module: what subprocess is given."""
    lists = [node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.List)]
    first = [node.elts[0] for node in lists if node.elts]
    return {node.value for node in first if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_two_modules_call_slurm() -> None:
    """One for the jobs of runs, one for what a cluster is like."""
    callers = {file.relative_to(PACKAGE).parts for file in PACKAGE.rglob("*.py") if command_lines(file) & SLURM}
    assert {parts for parts in callers if parts[0] != "localcluster"} == {
        ("launch", "slurm", "client.py"),
        ("launch", "slurm", "site.py"),
    }


def test_packages_stay_small() -> None:
    """A package with more modules than these needs packages of its own."""
    modules = Counter(file.parent.relative_to(PACKAGE) for file in PACKAGE.rglob("*.py") if file.name != "__init__.py")
    assert {str(package): count for package, count in modules.items() if count > 15} == {}


def test_no_two_modules_of_tests_share_a_name() -> None:
    """pytest would collect only one of them."""
    names = Counter(file.name for file in (PACKAGE.parent / "tests").rglob("test_*.py"))
    assert {name for name, count in names.items() if count > 1} == set()


def test_a_name_of_a_class_has_one_meaning() -> None:
    names = Counter(
        node.name
        for file in PACKAGE.rglob("*.py")
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert {name for name, count in names.items() if count > 1} == TWO_MEANINGS


def test_the_fixtures_of_engine_neurons_tests_exist() -> None:
    """Where its packages are missing, these tests are skipped before pytest looks for all of their fixtures."""
    plan = [sys.executable, "-m", "pytest", "--setup-plan", "--quiet", "-p", "no:cacheprovider", "tests/neuron"]
    done = subprocess.run(plan, cwd=PACKAGE.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SETUP    F neuron_jobs" in done.stdout
