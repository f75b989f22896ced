"""The sweep file: its points, and what is refused before anything is written."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from hyperpod_ft.errors import UserError
from hyperpod_ft.sweep.planning import PlannedSweep, plan_sweep
from hyperpod_ft.sweep.sweep_file import SweepFile, expand
from tests.conftest import run_file_values


def points(**values: Any) -> list[dict[str, Any]]:
    return list(expand(SweepFile.model_validate({"name": "s", "run": "run.yaml", **values})))


def planned(directory: Path, base: dict[str, Any] | None = None, **values: Any) -> PlannedSweep:
    (directory / "run.yaml").write_text(yaml.safe_dump(base or run_file_values(directory / "root")))
    path = directory / "sweep.yaml"
    path.write_text(yaml.safe_dump({"name": "s", "run": "run.yaml", **values}, sort_keys=False))
    return plan_sweep(path, "slurm")


def test_a_grid_is_every_combination_and_a_list_each_entry_of_it() -> None:
    assert points(grid={"seed": [1, 2], "lora.r": [8, 16]}) == [
        {"seed": 1, "lora.r": 8},
        {"seed": 1, "lora.r": 16},
        {"seed": 2, "lora.r": 8},
        {"seed": 2, "lora.r": 16},
    ]
    listed = [{"training.method": "full"}, {"training.method": "lora", "lora.r": 8}]
    assert points(list=listed) == listed
    assert points(list=listed, grid={"seed": [1, 2]}) == [one | {"seed": seed} for one in listed for seed in (1, 2)]


@pytest.mark.parametrize(
    ("values", "facts"),
    [
        ({}, ("grid", "list")),
        ({"grid": {"seed": []}}, ("seed", "no values")),
        ({"grid": {"seed": 3}}, ("grid.seed", "list")),
        ({"grid": {"lora..r": [1]}}, ("lora..r", "section.key")),
        ({"grid": {"cluster.root": ["/a", "/b"]}}, ("cluster.root", "run file")),
        ({"grid": {"seed": [1]}, "list": [{"seed": 2}]}, ("seed", "in grid and in list")),
        ({"grid": {key: list(range(20)) for key in ("a", "b", "c")}}, ("8,000 points", "1,000")),
        ({"gird": {"seed": [1]}}, ("gird", "grid?")),
        ({"grid": {"seed": [1]}, "run": "absent.yaml"}, ("absent.yaml", "no such run file")),
        ({"grid": {"seed": [1]}, "runs_at_a_time": 0}, ("runs_at_a_time", "1")),
        # the first two points are one run, since prompts do not change the training
        ({"grid": {"generate.max_new_tokens": [1, 2], "seed": [1]}}, ("points 1 and 2", "test/")),
    ],
)
def test_what_is_refused(tmp_path: Path, values: dict[str, Any], facts: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as refused:
        planned(tmp_path, **values)
    assert all(fact in str(refused.value) for fact in facts), refused.value
    assert not (tmp_path / "root").exists()


def test_every_point_is_validated_and_a_problem_is_named_once(tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        planned(tmp_path, grid={"lora.rank": [8], "parallelism.tensor_parallel": [2, 3], "lora.r": [8, 0]})
    lines = str(refused.value).splitlines()
    assert len(lines) == 2, lines
    assert "point 1: " in lines[0] and "lora.rank: unknown key" in lines[0]
    assert "point 2: " in lines[1] and "lora.r: " in lines[1]
    with pytest.raises(UserError, match=r"point 2: .*tensor_parallel"):
        planned(tmp_path, grid={"parallelism.tensor_parallel": [2, 3]})
    assert not (tmp_path / "root").exists()


def test_values_keep_their_type_and_each_run_can_be_submitted_alone(tmp_path: Path) -> None:
    names = ["q_proj", "ü"]
    sweep = planned(tmp_path, list=[{"training.learning_rate": 1e-5, "lora.target_modules": names}, {"seed": 3}])
    first, second = sweep.runs
    assert (first.config.training.learning_rate, list(first.config.lora.target_modules or ())) == (1e-5, names)
    assert second.config.seed == 3
    assert sweep.sweep.points[1].origin == f"{tmp_path}/run.yaml --set=seed=3"
    assert sweep.sweep.keys == ["training.learning_rate", "lora.target_modules", "seed"]
