"""`engine: auto`: which engine a run file gets, and that nothing but that differs from naming it."""

from pathlib import Path
from typing import Any, get_args

import pytest

from hyperpod_ft.config import engine_choice
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.config.sections.training import Training
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.certificate import naming_trl
from hyperpod_ft.planning.engine_rules import limits_of
from hyperpod_ft.planning.parallelism import degrees_of
from hyperpod_ft.planning.plan import plan
from tests.unit.config.run_files import load, refused

LOCAL: dict[str, Any] = {"cluster__instance_type": "local", "parallelism": {"ranks_per_node": 1}}
PAIRS: dict[str, Any] = {"training__objective": "dpo", "dataset__format": "preference", "dataset__packing": "none"}
PROMPTS: dict[str, Any] = {
    **{"training__objective": "grpo", "dataset__format": "prompt", "training__micro_batch_size": 8},
    "reward": [{"function": "json"}],
}


@pytest.mark.parametrize(
    ("values", "engine", "why"),
    [
        ({}, "torch", "has all that the run needs, and is faster than trl"),
        (PAIRS, "torch", "has all that the run needs, and is faster than trl"),
        (PROMPTS, "trl", "engine torch has no grpo"),
        ({"trl": {"loss_type": "dft"}}, "trl", "engine torch has no trl.loss_type"),
        ({"cluster__instance_type": "trn2.48xlarge", "parallelism": {}}, "torch", ""),
    ],
)
def test_auto_is_trl_only_where_torch_lacks_something(
    tmp_path: Path, values: dict[str, Any], engine: str, why: str
) -> None:
    given = {**LOCAL, **values}
    config, named = load(tmp_path, **given, engine="auto"), load(tmp_path, **given, engine=engine)
    assert config == named and plan(config) == plan(named)
    assert engine_choice.why(config) == why


@pytest.mark.parametrize("objective", get_args(Training.model_fields["objective"].annotation))
def test_torch_refuses_the_objectives_that_auto_takes_trl_for(objective: str) -> None:
    training = Training.model_construct(**{**Training().model_dump(), "objective": objective})
    base = {"name": "a", "engine": "torch", "model": {"source": "a/b"}, "dataset": {"source": "a/b", "format": "text"}}
    config = RunConfig.model_validate(base | {"cluster": {"instance_type": "local"}})
    config = config.model_copy(update={"training": training})
    if engine_choice.lacking(config):
        with pytest.raises(UserError, match=rf"^training\.objective: engine torch has no {objective}; set engine: trl"):
            limits_of("torch").check_settings(config)
    else:
        limits_of("torch").check_settings(config)


def test_a_named_engine_is_not_replaced(tmp_path: Path) -> None:
    assert load(tmp_path, **LOCAL, engine="trl").engine == "trl"
    assert refused(tmp_path, **LOCAL, **PROMPTS, engine="torch").startswith("training.objective: engine torch has no")
    assert "trl: has no effect with engine torch" in refused(tmp_path, **LOCAL, engine="torch", trl={"tf32": True})
    # what neither has is refused as by the engine that is taken
    assert "engine trl does not run on trn2" in refused(
        tmp_path, engine="auto", cluster__instance_type="trn2.48xlarge", parallelism={}, **PROMPTS
    )


@pytest.mark.parametrize(
    ("problem", "family", "values", "named"),
    [
        ("model.source: a small model cannot be trained", "llama", {}, True),
        ("model.source: a small model cannot be trained", "bert", {}, False),
        ("model.source: a small model cannot be trained", "llama", {"lora__quantization": "nf4"}, False),
        ("lora.target_modules: no module is named x", "llama", {}, False),
        ("model.source: a small model cannot be trained", "llama", {"engine": "trl"}, False),
    ],
)
def test_what_is_refused_later_names_the_other_engine(
    tmp_path: Path, problem: str, family: str, values: dict[str, Any], named: bool
) -> None:
    config = load(tmp_path, **{**LOCAL, "engine": "auto", **values})
    with (
        pytest.raises(UserError) as error,
        naming_trl(config, degrees_of(config), {"model_type": family}),
    ):
        raise UserError(problem, "choose another")
    assert str(error.value) == f"{problem}; choose another{', or try engine: trl' if named else ''}"
