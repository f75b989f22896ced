"""Every engine has its own entry wherever engines differ: a new one cannot take another's path by default."""

from importlib.util import find_spec
from typing import get_args

import pytest

from hyperpod_ft.config.run_config import EngineName
from hyperpod_ft.config.sections.cluster import Tracker
from hyperpod_ft.environments import build
from hyperpod_ft.planning import engine_rules, pins

NAMES = get_args(EngineName)


@pytest.mark.parametrize("table", [engine_rules._LIMITS, engine_rules._RULES])
def test_tables_name_every_engine(table: dict[EngineName, object]) -> None:
    assert sorted(table) == sorted(NAMES)


def test_every_environment_of_a_training_can_be_built() -> None:
    """What training jobs add to an image, trackers and evaluations have environments of their own."""
    others = {"aws", pins.EVALUATION_ENVIRONMENT, *get_args(Tracker)}
    kinds = {pins.environment_kind(path.stem) for path in pins.pins_file("torch").parent.glob("*.txt")}
    assert kinds - others == build._BUILDERS.keys() and set(NAMES) | others <= kinds


@pytest.mark.parametrize("name", NAMES)
def test_engines_have_all_rules_and_a_training_loop(name: EngineName) -> None:
    """mypy compares the signatures."""
    for protocol, module in (
        (engine_rules.EngineRules, engine_rules.rules_of(name)),
        (engine_rules.Limits, engine_rules.limits_of(name)),
    ):
        wanted = {entry for entry in vars(protocol) if not entry.startswith("_")} | protocol.__annotations__.keys()
        assert wanted <= vars(module).keys()
    assert find_spec(f"hyperpod_ft.engines.{name}.loop")
