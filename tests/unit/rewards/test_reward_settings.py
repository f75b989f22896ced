"""What a run file may say of rewards, and what is refused when it is read."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hyperpod_ft.config import run_file
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.engine_rules import limits_of, rules_of
from hyperpod_ft.planning.parallelism import degrees_of
from hyperpod_ft.planning.plan import plan
from tests.unit.config.run_files import load, refused

GRPO: dict[str, Any] = {
    "engine": "trl",
    "cluster__instance_type": "p5.48xlarge",
    "parallelism__tensor_parallel": 1,
    "parallelism__ranks_per_node": 8,
    "training__objective": "grpo",
    "dataset__format": "prompt",
    "reward": [{"function": "json"}],
}
TAUGHT = {
    "training__objective": "distillation",
    "teacher": {"source": "Qwen/Qwen3-8B"},
    "reward": [],
}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"reward": []}, "reward: is missing"),
        ({"reward": [{"function": "jsn"}]}, "reward.0: function: jsn is neither"),
        ({"reward": [{"function": "regex"}]}, "pattern: is missing"),
        ({"reward": [{"function": "regex", "pattern": "("}]}, "pattern: is not a regular expression"),
        ({"reward": [{"function": "json", "column": "a"}]}, "column: has no effect with function json"),
        ({"reward": [{"function": "math_verify"}]}, "column: is missing"),
        (
            {"reward": [{"function": "json", "json_schema": {"properties": {"a": {"type": "objet"}}}}]},
            "json_schema: is not a JSON schema: $.properties.a.type: 'objet' is not valid",
        ),
        (
            {"reward": [{"function": "json", "json_schema": {"allOf": [{"$ref": "https://a.b/c"}]}}]},
            "json_schema: its reference https://a.b/c leads to nothing in it; correct it",
        ),
        ({"reward": [{"function": "regex", "pattern": "a", "json_schema": {}}]}, "json_schema: has no effect"),
        ({"reward": [{"function": "json", "json_schema": {"$id": 5}}]}, "json_schema: is not a JSON schema: "),
        (
            {"reward": [{"function": "json", "json_schema": {"allOf": [{"$ref": "#"}]}}]},
            "json_schema: its references lead back to themselves",
        ),
        ({"reward": [{"function": "length"}]}, "max_length: is missing"),
        ({"reward": [{"function": "json"}] * 2}, "reward.0.name: json is there twice"),
        ({"training__validate_every_steps": 2}, "training.validate_every_steps: objective grpo has no"),
        ({"dataset__packing": "bfd"}, "dataset.packing: bfd is not possible with format prompt"),
        ({"dataset__format": "text"}, "objective grpo and format prompt go together"),
        ({"training__objective": "sft"}, "objective grpo, rloo or distillation and format prompt go together"),
        ({"engine": "torch"}, "training.objective: engine torch has no grpo"),
        ({"engine": "torch", "training__objective": "rloo"}, "training.objective: engine torch has no rloo"),
        ({"sampling__generations": 3}, "sampling.generations: 3 does not divide the 8 answers of a step"),
        ({"lora__modules_to_save": ["lm_head"]}, "lora.modules_to_save: TRL samples answers without autocast"),
        ({"teacher": {"source": "a/b"}}, "teacher: has no effect without training.objective distillation"),
        ({"training__objective": "distillation"}, "reward: has no effect without training.objective grpo or rloo"),
        ({"training__objective": "distillation", "reward": []}, "teacher: is missing"),
        ({**TAUGHT, "sampling__generations": 2}, "sampling.generations: has no effect with objective distillation"),
        ({**TAUGHT, "training__validate_every_steps": 2}, "objective distillation has no validation loss"),
        ({**TAUGHT, "trl": {"beta": 0.1}}, "set teacher.beta instead"),
        ({**TAUGHT, "engine": "torch"}, "training.objective: engine torch has no distillation"),
        ({"trl": {"beta": 0.1}}, "set sampling.beta instead"),
        ({"trl": {"num_iterations": 2}}, "'num_iterations' is not one of the settings"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(tmp_path: Path, changed: dict[str, Any], says: str) -> None:
    assert says in refused(tmp_path, **GRPO | changed)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "no such file or directory"),
        ("def g(prompt, completion, **columns): ...", "defines no function f at its top level"),
        ("def f(prompt, completion): ...", "line 1: f does not take all columns"),
        ("def f(completion, **columns): ...", "line 1: f is not a function of a prompt and a completion"),
        ("async def f(prompt, completion, **columns): ...", "line 1: f is not a function"),
        ("def f(:", "is not valid Python in line 1"),
    ],
)
def test_a_file_is_read_but_not_executed(tmp_path: Path, text: str | None, says: str) -> None:
    if text is not None:
        (tmp_path / "rewards.py").write_text(f"{text}\nraise SystemExit('was executed')")
    said = refused(tmp_path, **GRPO | {"reward": [{"function": "rewards.py:f"}]})
    assert said.startswith("reward.0.function: ") and says in said


def test_references_are_looked_up_where_a_schema_has_some(tmp_path: Path) -> None:
    """A subschema with an id of its own has its own references, and data has no references."""
    inner = {"$id": "https://a.b/inner", "$defs": {"c": {"type": "string"}}, "$ref": "#/$defs/c"}
    schema = {"properties": {"inner": inner, "data": {"enum": [{"$ref": "zzz"}]}}}
    assert load(tmp_path, **GRPO | {"reward": [{"function": "json", "json_schema": schema}]}).reward


def test_a_head_node_without_jsonschema_leaves_schemas_to_the_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    assert load(tmp_path, **GRPO | {"reward": [{"function": "json", "json_schema": {"type": "objet"}}]}).reward


def test_an_answer_must_fit_after_its_prompt(tmp_path: Path) -> None:
    """The model's positions are known once its config.json is."""
    config = load(tmp_path, **GRPO, dataset__max_length=1024, sampling__max_completion_length=1024)
    check = partial(limits_of("trl").check_model_config, config, degrees_of(config))
    check({"model_type": "llama", "max_position_embeddings": 2048})
    with pytest.raises(UserError, match=r"^sampling.max_completion_length: .* 1024 .* model's 2047 positions"):
        check({"model_type": "llama", "max_position_embeddings": 2047})


def test_the_environment_has_what_functions_need(tmp_path: Path) -> None:
    functions = [{"function": "math_verify", "column": "a"}, {"function": "json", "json_schema": {"type": "object"}}]
    imports = rules_of("trl").imports
    assert {"jsonschema", "math_verify"} < {*imports(load(tmp_path, **GRPO | {"reward": functions}))}
    assert not {"jsonschema", "math_verify"} & {*imports(load(tmp_path, **GRPO))}


def test_a_store_has_no_files_of_rewards(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("def f(prompt, completion, /, **columns): return 1.0")
    section = {"region": "us-west-2", "role": "arn:aws:iam::111122223333:role/r", "store": "s3://bucket/ft"}
    own = {"reward": [{"function": "json"}, {"function": "rewards.py:f"}]}
    assert "reward.1.function: with sagemaker.store" in refused(tmp_path, **GRPO | own, sagemaker=section)
    assert load(tmp_path, **GRPO, sagemaker=section).sagemaker and load(tmp_path, **GRPO | own).reward


def test_a_run_depends_on_what_is_in_the_file_not_on_where_it_is(tmp_path: Path) -> None:
    ids = []
    for folder, value in (("one", 1), ("two", 1), ("three", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "rewards.py").write_text(f"def f(prompt, completion, **columns): return {value}\n")
        config = load(tmp_path, **GRPO | {"reward": [{"function": f"{folder}/rewards.py:f"}]})
        assert run_file.resolve(config, Path("/")) == config
        ids.append(plan(config).run_id)
    assert ids[0] == ids[1] != ids[2]
    assert plan(load(tmp_path, **GRPO)).run_id != plan(load(tmp_path, **GRPO | {"sampling__beta": 0.1})).run_id
