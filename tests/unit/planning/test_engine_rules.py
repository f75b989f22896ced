"""Every engine has its own entry wherever engines differ: a new one cannot take another's path by default."""

import ast
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import pytest

from hyperpod_ft.config.run_config import EngineName, RunConfig
from hyperpod_ft.config.sections.cluster import Tracker
from hyperpod_ft.environments import installation
from hyperpod_ft.planning import engine_rules, pins

NAMES = [name for name in get_args(EngineName) if name != "auto"]


@pytest.mark.parametrize("table", [engine_rules._LIMITS, engine_rules._RULES])
def test_tables_name_every_engine(table: dict[EngineName, object]) -> None:
    assert sorted(table) == sorted(NAMES)


def test_every_environment_of_a_training_can_be_built() -> None:
    """What training jobs add to an image, trackers and evaluations have environments of their own."""
    others = {"aws", pins.EVALUATION_ENVIRONMENT, *get_args(Tracker), "mlflow-sagemaker"}
    kinds = {pins.environment_kind(path.stem) for path in pins.pins_file("torch").parent.glob("*.txt")}
    assert kinds - others == installation._HAS_NEURON.keys() and set(NAMES) | others <= kinds


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


@pytest.mark.parametrize("name", NAMES)
def test_every_error_of_an_engines_limits_begins_with_its_key(name: EngineName) -> None:
    """A key of a run file, by the text of all that the module raises."""
    schema = RunConfig.model_json_schema()
    keys = set(schema["properties"])
    for section, properties in schema["properties"].items():
        for reference in [properties, *properties.get("anyOf", ()), *properties.get("allOf", ())]:
            definition = schema["$defs"].get(reference.get("$ref", "").rpartition("/")[2], {})
            keys |= {f"{section}.{key}" for key in definition.get("properties", ())}
    source = engine_rules.limits_of(name).__file__
    assert isinstance(source, str)
    raised = [node.exc for node in ast.walk(ast.parse(Path(source).read_text())) if isinstance(node, ast.Raise)]
    assert len(raised) > 8
    for error in raised:
        assert isinstance(error, ast.Call)
        parts = error.args[0].values if isinstance(error.args[0], ast.JoinedStr) else [error.args[0]]
        message = "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in parts)
        assert any(fnmatch(key, message.partition(": ")[0]) for key in keys), message
