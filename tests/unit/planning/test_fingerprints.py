"""Fingerprints leave out what a run file leaves at its default, so that a new key changes no run's id."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from hyperpod_ft.config.fields import Section
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.config.sections.training import Training
from hyperpod_ft.planning import plan as planned
from hyperpod_ft.planning.plan import plan
from hyperpod_ft.runs.run import Run
from tests import golden
from tests.conftest import MakeRun

LEFT_OUT = Path(__file__).with_name("left_out.json")
# Together they have all stages, and every section that changes results has an effect in one of them.
RUNS: tuple[dict[str, Any], ...] = (
    {"eval": {"tasks": ["mmlu"]}, "training__method": "full"},
    {"engine": "neuron", "cluster__instance_type": "trn1.32xlarge", "parallelism": {}},
)


class _TrainingWithMore(Training):
    mixup: int = 3


class _New(Section):
    key: str = "default"


class _RunConfigWithMore(RunConfig):
    training: _TrainingWithMore = Field(default_factory=_TrainingWithMore)
    new: _New = Field(default_factory=_New)


@pytest.mark.parametrize("overrides", RUNS)
def test_a_new_key_or_section_with_its_default_changes_no_run(make_run: MakeRun, overrides: dict[str, Any]) -> None:
    values = make_run(**overrides).config.model_dump()
    ours, newer = plan(RunConfig.model_validate(values)), plan(_RunConfigWithMore.model_validate(values))
    assert newer == ours
    values["training"]["mixup"] = 4
    assert plan(_RunConfigWithMore.model_validate(values)).run_id != ours.run_id, "a value that was set does"


def test_a_key_set_to_its_default_changes_no_run(make_run: MakeRun) -> None:
    assert make_run(training__epochs=3, lora__r=16).plan == make_run().plan


def test_what_an_encoder_decoder_gets_by_default_is_as_if_it_were_set(make_run: MakeRun) -> None:
    """So that answers which were written before ROUGE was the default are scored."""
    pairs = {"dataset__format": "prompt-completion", "dataset__max_target_length": 32}
    default, scored, other = (
        make_run(**pairs, **rouge).plan["generate"].fingerprint
        for rouge in ({}, {"generate__rouge": True}, {"generate__rouge": False})
    )
    assert default == scored != other


def left_out(run: Run, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """Of each stage its version, and the defaults that its fingerprint leaves out."""
    given = run.config.differing()
    defaults = {key: value for key, value in run.config.by_key().items() if key not in given}
    monkeypatch.setattr(RunConfig, "differing", lambda _: defaults)
    stages = ((stage.name, planned._STAGES[stage.name]) for stage in run.plan.stages)
    return {
        name: {key: value for key, value in stage.depends_on(run.config, run.plan.degrees).items() if key in defaults}
        | {"version": stage.version}
        for name, stage in stages
    }


def test_a_changed_default_raises_the_version_of_its_stages(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """HYPERPOD_FT_REFRESH_GOLDEN=1 pytest tests/unit/planning/test_fingerprints.py records new keys and versions."""
    now: dict[str, dict[str, Any]] = {}
    for run in [make_run(**overrides) for overrides in RUNS]:
        with monkeypatch.context() as patch:
            for name, stage in left_out(run, patch).items():
                now[name] = now.get(name, {}) | stage
    for name, recorded in json.loads(LEFT_OUT.read_text(encoding="utf-8")).items():
        changed = [key for key, default in recorded.items() if now[name].get(key, default) != default]
        assert not changed or "version" in changed, f"stage {name}: {changed}: raise its version in planning/plan.py"
    golden.check(LEFT_OUT, json.dumps(now, indent=1, sort_keys=True) + "\n")
