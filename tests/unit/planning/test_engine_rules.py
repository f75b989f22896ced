"""Every engine has its own entry wherever engines differ: a new one cannot take another's path by default."""

from importlib.util import find_spec
from typing import get_args

import pytest

from hyperpod_ft.config import setting_combinations
from hyperpod_ft.config.run_config import EngineName
from hyperpod_ft.planning import engine_rules, pins
from hyperpod_ft.stages import env

NAMES = get_args(EngineName)


@pytest.mark.parametrize("table", [setting_combinations._CHECKS, engine_rules._RULES])
def test_tables_name_every_engine(table: dict[EngineName, object]) -> None:
    assert sorted(table) == sorted(NAMES)


def test_every_environment_can_be_built() -> None:
    kinds = {pins.environment_kind(path.stem) for path in pins.pins_file("torch").parent.glob("*.txt")} - {"aws"}
    assert kinds == env._BUILDERS.keys() and set(NAMES) <= kinds


@pytest.mark.parametrize("name", NAMES)
def test_engines_have_all_rules_and_a_training_loop(name: EngineName) -> None:
    """mypy compares the signatures."""
    wanted = {entry for entry in vars(engine_rules.EngineRules) if not entry.startswith("_")}
    wanted |= engine_rules.EngineRules.__annotations__.keys()
    assert wanted <= vars(engine_rules.rules_of(name)).keys()
    assert find_spec(f"hyperpod_ft.engines.{name}.loop")
