"""The road works without the annexes: a copy of the kit from which they are removed plans, renders and trains.

Each is removed alone too, but a training, which takes 40 s, runs only without all of them: it imports none, which
import-linter checks, and asks the registry for those that are left, as planning and rendering do.
"""

import json
import re
import shutil
from pathlib import Path

import pytest

from hyperpod_ft.annexes import NAMES
from tests.programs import call

ROOT = Path(__file__).resolve().parents[2]


def without(directory: Path, *names: str) -> Path:
    """A checkout whose package lacks these annexes: their folders, and their names in the registry."""
    for part in ("hyperpod_ft", "templates", "examples"):
        # with the compiled modules, but none that another test is just writing
        shutil.copytree(ROOT / part, directory / part, ignore=shutil.ignore_patterns("*.pyc.*"))
    registry = directory / "hyperpod_ft" / "annexes.py"
    left = tuple(name for name in NAMES if name not in names)
    text, replaced = re.subn(r"(?m)^NAMES = .*$", f"NAMES: tuple[str, ...] = {left!r}", registry.read_text())
    assert replaced == 1
    registry.write_text(text)
    for name in names:
        shutil.rmtree(directory / "hyperpod_ft" / name)
    return directory


def kit(checkout: Path, *arguments: str) -> str:
    """The output of a command of that checkout, on a root of its own."""
    root = checkout / "root"
    more = [] if arguments[0] == "--help" else [f"--set=cluster.root={root}"]
    done = call(*arguments, *more, cwd=checkout, PYTHONPATH=str(checkout), XDG_STATE_HOME=str(root))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_the_kit_plans_and_renders_without_one(tmp_path: Path, name: str) -> None:
    checkout = without(tmp_path / "kit", name)
    stages = [stage["name"] for stage in json.loads(kit(checkout, "plan", "quickstart", "--json"))["stages"]]
    written = kit(checkout, "render", "quickstart", "-o", str(tmp_path / "scripts")).split()
    assert [Path(path).stem for path in written] == stages


def test_the_kit_trains_without_any(tmp_path: Path) -> None:
    checkout = without(tmp_path / "kit", *NAMES)
    listed = kit(checkout, "--help")
    assert "submit" in listed and not re.search(r"(?m)^ +(cluster|sagemaker|deploy|serve|local) ", listed)
    small = {
        "training.max_steps": 2,
        "cluster.nodes": 1,
        "parallelism.tensor_parallel": 1,
        "parallelism.ranks_per_node": 1,
        "generate.validation_samples": 2,
    }
    kit(
        checkout,
        *("submit", "quickstart", "--launcher", "process", "--watch"),
        *(f"--set={key}={value}" for key, value in small.items()),
    )
    (merged,) = (checkout / "root").glob("runs/quickstart/*/merged/model.safetensors")
    assert merged.stat().st_size > 1e6
