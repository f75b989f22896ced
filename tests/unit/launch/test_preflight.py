"""What `submit` refuses before a job starts."""

from pathlib import Path

import pytest

from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.preflight import check_run
from tests.conftest import MakeRun


@pytest.mark.parametrize(
    ("engine", "instance_type", "name", "refused"),
    [
        ("torch", "trn2.48xlarge", "python3.11", True),
        ("torch", "trn2.48xlarge", "python3.12", False),
        ("torch", "trn2.48xlarge", "python3", False),  # stage env asks it
        ("torch", "p5.48xlarge", "python3.11", False),
        ("neuron", "trn2.48xlarge", "python3.12", True),
        ("neuron", "trn2.48xlarge", "python3.11", False),
    ],
)
def test_an_interpreter_without_packages_for_trainium_is_refused(
    make_run: MakeRun, tmp_path: Path, engine: str, instance_type: str, name: str, refused: bool
) -> None:
    (tmp_path / name).touch()
    (tmp_path / "venv-python").symlink_to(tmp_path / name)
    run = make_run(
        engine=engine,
        cluster__instance_type=instance_type,
        env__python=str(tmp_path / "venv-python"),
        parallelism={"tensor_parallel": 4},
    )
    if not refused:
        check_run(run)
        return
    with pytest.raises(UserError, match=r"env\.python: .*is Python 3\.1\d, and engine .* needs 3\.1") as error:
        check_run(run)
    assert len(str(error.value).splitlines()) == 1
