"""What .ci/run makes of its parts: tests with another torch, those of engine neuron, all others; all stand-ins here."""

import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
NEURON, TORCH, SUITE = "test-neuron.sh", "test-torch.sh", "test.sh"
STAND_IN = '#!/bin/bash\necho "$(basename "$0")" "$@"\n[[ $(basename "$0") != "$FAILING" ]]\n'


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (checkout := tmp_path / "checkout").mkdir()
    shutil.copytree(REPOSITORY / ".ci", checkout / ".ci")
    for script in (checkout / "scripts" / name for name in (NEURON, TORCH, SUITE)):
        script.parent.mkdir(exist_ok=True)
        script.write_text(STAND_IN)
        script.chmod(0o755)
    return checkout


def ci(checkout: Path, failing: str = "", **environment: str) -> tuple[int, list[str], str]:
    """Exit status, lines of standard output, and standard error."""
    command = ["env", "--unset=NEURONX_DISTRIBUTED", f"FAILING={failing}"]
    command += [f"{name}={value}" for name, value in environment.items()]
    done = subprocess.run([*command, checkout / ".ci" / "run"], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.splitlines(), done.stderr


@pytest.mark.parametrize("failing", ["", NEURON, TORCH, SUITE])
def test_all_run_and_each_can_fail_it(checkout: Path, failing: str) -> None:
    beside = "../shared/third_party/neuronx-distributed"
    (checkout / beside).mkdir(parents=True)
    status, lines, errors = ci(checkout, failing)
    assert lines == [SUITE]
    assert bool(status) == bool(failing)
    assert f"{NEURON} {beside}\n" in errors and f"{TORCH}\n" in errors
    assert ("ENGINE NEURON FAILED" in errors) == (failing == NEURON)
    assert ("ANOTHER TORCH FAILED" in errors) == (failing == TORCH)


def test_where_upstreams_source_is_not_found_it_says_so(checkout: Path) -> None:
    status, lines, errors = ci(checkout)
    assert (status, lines) == (0, [SUITE])
    assert "ENGINE NEURON" in errors and "NEURONX_DISTRIBUTED" in errors
    assert f"{NEURON} /elsewhere\n" in ci(checkout, NEURONX_DISTRIBUTED="/elsewhere")[2]
