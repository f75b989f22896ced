"""The plan: which stages, in what order, with which resources, and when a fingerprint changes."""

from typing import Any

import pytest

from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.parallelism import Degrees
from hyperpod_ft.runs.run import Run
from tests.conftest import MakeRun


def names(run: Run) -> list[str]:
    return [stage.name for stage in run.plan.stages]


def test_stages_by_engine_and_method(make_run: MakeRun) -> None:
    everything = ["env", "download", "certify", "dataset", "train", "consolidate", "merge", "generate"]
    neuron = make_run(engine="neuron", cluster__instance_type="trn1.32xlarge", parallelism={"tensor_parallel": 8})
    assert names(make_run()) == everything
    assert names(make_run(training__method="full")) == [name for name in everything if name != "merge"]
    of_neuron = ["precompile" if name == "certify" else name for name in everything]
    of_neuron[2:4] = ["dataset", "precompile"]
    assert names(neuron) == of_neuron


def test_the_last_stage_that_writes_weights_makes_the_model(make_run: MakeRun) -> None:
    assert make_run().plan.model_stage == "merge"
    assert make_run(training__method="full").plan.model_stage == "consolidate"


def test_every_stage_needs_only_earlier_ones(make_run: MakeRun) -> None:
    for run in (make_run(), make_run(training__method="full")):
        for position, stage in enumerate(run.plan.stages):
            assert set(stage.needs) <= set(names(run)[:position])


def changed(make_run: MakeRun, **overrides: Any) -> list[str]:
    before, after = make_run().plan, make_run(**overrides).plan
    return [stage.name for stage in before.stages if after[stage.name].fingerprint != stage.fingerprint]


def test_a_change_reaches_what_depends_on_it_and_nothing_else(make_run: MakeRun) -> None:
    from_train = ["train", "consolidate", "merge", "generate"]
    assert changed(make_run, generate__max_new_tokens=3) == ["generate"]
    assert changed(make_run, merge__dtype="float32") == ["merge", "generate"]
    assert changed(make_run, training__learning_rate=1.0) == from_train
    assert changed(make_run, lora__r=4) == from_train
    assert changed(make_run, dataset__max_length=64) == ["dataset", *from_train]
    assert changed(make_run, model__revision="other") == ["download", "certify", "dataset", *from_train]
    interpreter = changed(make_run, env__python="/opt/python")
    assert interpreter == ["env", "certify"], "the path of an interpreter does not change the run"
    assert changed(make_run, lora__target_modules=["q_proj"]) == ["certify", *from_train]
    assert changed(make_run, seed=1) == ["dataset", *from_train]
    preferring = {"training__objective": "dpo", "dataset__format": "preference"}
    assert changed(make_run, **preferring) == ["certify", "dataset", *from_train]
    with_beta = make_run(**preferring, dpo={"beta": 0.5}).plan
    assert with_beta.run_id != make_run(**preferring).plan.run_id


@pytest.mark.parametrize(
    "overrides",
    [
        {"name": "other"},
        {"cluster__partition": "gpu"},
        {"cluster__time_limit": "1:00:00"},
        {"cluster__environment": {"A": "b"}},
        {"training__save_every_steps": 7},
        {"training__keep_checkpoints": 9},
        {"training__sanity_steps": 0},
        {"training__sanity_margin": 9.0},
        {"cluster__price_per_node_hour": 21.5},
        {"dataset__workers": 3},
    ],
)
def test_what_changes_no_result_changes_no_fingerprint(make_run: MakeRun, overrides: dict[str, Any]) -> None:
    assert changed(make_run, **overrides) == []


PLACES: list[dict[str, Any]] = [
    {"cluster__nodes": 2, "training__gradient_accumulation_steps": 4},
    {"cluster__nodes": 4, "training__gradient_accumulation_steps": 1, "training__micro_batch_size": 4},
    {"parallelism": {"ranks_per_node": 2, "tensor_parallel": 2, "sharding": "zero3"}},
    {"parallelism": {"ranks_per_node": 2, "pipeline_parallel": 2}},
    {"parallelism": {"ranks_per_node": 2, "context_parallel": 2}},
    {"cluster__instance_type": "p5.48xlarge", "parallelism": {"tensor_parallel": 8}},
    {"training__compile": True, "training__activation_checkpointing": "full", "training__activation_offload": True},
]
STEP = {
    "training__gradient_accumulation_steps": 8,
    "training__micro_batch_size": 2,
    "parallelism": {"ranks_per_node": 1},
}
# what continues in one place only
BOUND: list[dict[str, Any]] = [
    {"lora__dropout": 0.1},
    {"training__optimizer_state": "int8"},
    {"engine": "trl"},
]


@pytest.mark.parametrize("place", PLACES)
def test_a_run_is_the_same_wherever_its_steps_have_the_same_rows(make_run: MakeRun, place: dict[str, Any]) -> None:
    run, moved = make_run(**STEP), make_run(**STEP | place)
    assert moved.config.rows_per_step(moved.plan.degrees.data_parallel) == 16
    assert moved.paths.directory == run.paths.directory
    assert [stage.fingerprint for stage in moved.plan.following("dataset")] == [
        stage.fingerprint for stage in run.plan.following("dataset")
    ]


@pytest.mark.parametrize("settings", BOUND)
def test_a_run_is_another_where_its_checkpoints_cannot_continue(make_run: MakeRun, settings: dict[str, Any]) -> None:
    run, moved = make_run(**STEP | settings), make_run(**STEP | settings | PLACES[0])
    assert moved.plan.run_id != run.plan.run_id
    full = {"training__method": "full", "lora__dropout": 0.1}
    assert make_run(**STEP | full).plan.run_id == make_run(**STEP | full | PLACES[0]).plan.run_id, "it has no adapters"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            {"training__gradient_accumulation_steps": 2},
            r"cluster\.min_nodes: not with 3 nodes: training\.gradient_accumulation_steps: a step has 8 rows, which 3 ",
        ),
        ({"lora__dropout": 0.1}, r"cluster\.min_nodes: this training cannot continue on other nodes"),
        ({"engine": "trl"}, r"cluster\.min_nodes: this training cannot continue on other nodes"),
        ({"cluster__min_nodes": 5}, r"cluster: min_nodes: 5 is more than nodes: 4"),
    ],
)
def test_training_must_be_possible_on_every_number_of_nodes(
    make_run: MakeRun, overrides: dict[str, Any], words: str
) -> None:
    """Slurm may give any of them."""
    possible = {"training__gradient_accumulation_steps": 3, "parallelism": {"ranks_per_node": 1}}
    four = possible | {"cluster__nodes": 4, "cluster__min_nodes": 2}
    assert make_run(**four).plan == make_run(**possible | {"cluster__nodes": 4}).plan
    with pytest.raises(UserError, match=words):
        make_run(**four | overrides)


def test_a_run_with_other_rows_in_a_step_is_another(make_run: MakeRun) -> None:
    assert make_run(**STEP).plan.run_id != make_run(**STEP | {"training__micro_batch_size": 4}).plan.run_id


NEURON = {"engine": "neuron", "cluster__instance_type": "trn1.32xlarge", "parallelism": {"tensor_parallel": 8}}


@pytest.mark.parametrize(
    "overrides",
    [
        {"training__learning_rate": 1.0, "training__schedule": "linear", "training__warmup_share": 0.5},
        {"training__epochs": 9, "seed": 3},
        {"dataset": {"source": "org/other", "format": "chat", "revision": "1"}},
        {"neuron": {"precompile_steps": 20, "xser": False}},
        {"name": "other", "cluster__time_limit": "1:00:00", "cluster__environment": {"A": "b"}},
    ],
)
def test_runs_of_the_same_shapes_share_their_compiled_graphs(make_run: MakeRun, overrides: dict[str, Any]) -> None:
    one, other = make_run(**NEURON), make_run(**{**NEURON, **overrides})
    assert one.paths.record_path("precompile") == other.paths.record_path("precompile")
    assert (
        one.paths.neuron_cache
        == other.paths.neuron_cache
        == one.paths.root / "neuron-cache" / one.plan["precompile"].fingerprint
    )


@pytest.mark.parametrize(
    "overrides",
    [
        {"model__revision": "other"},
        {"dataset__max_length": 4096},
        {"training__micro_batch_size": 2},
        {"training__gradient_accumulation_steps": 2},
        {"training__precision": "fp32"},
        {"training__method": "full"},
        {"training__activation_checkpointing": "full"},
        {"lora": {"r": 8}},
        {"parallelism": {"tensor_parallel": 4}},
        {"cluster__nodes": 2},
        {"cluster__instance_type": "trn1n.32xlarge"},
        {"neuron": {"zero_1": False}},
        {"cluster__environment": {"NEURON_CC_FLAGS": "-O1"}},
        {"env": {"sdk": "2.28.0"}},
    ],
)
def test_what_changes_graphs_has_a_cache_of_its_own(make_run: MakeRun, overrides: dict[str, Any]) -> None:
    neuron = {**NEURON, "env": {}}
    assert make_run(**neuron).paths.neuron_cache != make_run(**{**neuron, **overrides}).paths.neuron_cache


def test_another_sdk_makes_no_other_run(make_run: MakeRun) -> None:
    one, other = (make_run(**{**NEURON, "env": {"sdk": sdk}}) for sdk in ("2.26.1", "2.28.0"))
    assert one.plan.run_id == other.plan.run_id
    assert one.paths.environment_path != other.paths.environment_path


def test_lora_settings_do_not_matter_for_full_training(make_run: MakeRun) -> None:
    assert make_run(training__method="full").plan.run_id == make_run(training__method="full", lora__r=2).plan.run_id


def test_downstream_changes_stay_in_the_same_run(make_run: MakeRun) -> None:
    assert make_run().paths.directory == make_run(generate__max_new_tokens=3, merge__dtype="float32").paths.directory
    assert make_run().paths.directory != make_run(seed=7).paths.directory
    full, rounded = (make_run(training__method="full", merge={"dtype": dtype}).plan for dtype in ("base", "bfloat16"))
    assert full.run_id == rounded.run_id and full["consolidate"].fingerprint != rounded["consolidate"].fingerprint


def test_resources(make_run: MakeRun) -> None:
    run = make_run(
        engine="neuron",
        cluster__instance_type="trn1.32xlarge",
        cluster__nodes=4,
        cluster__partition="dev",
        cluster__cpu_partition="cpu",
        parallelism={"tensor_parallel": 8},
    )
    train, merge = run.plan["train"].resources, run.plan["merge"].resources
    assert (train.nodes, train.exclusive, train.partition) == (4, True, "dev")
    assert (merge.nodes, merge.exclusive, merge.partition) == (1, False, "cpu")
    asked = {stage.name: stage.resources.cpus for stage in run.plan.stages if not stage.resources.exclusive}
    assert asked == {"env": 1, "download": 2, "dataset": 8, "consolidate": 2, "merge": 2, "generate": 8}
    assert run.plan.degrees == Degrees(4, 32, 8, 1)
    assert run.plan.degrees.data_parallel == 16


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            {"parallelism": {"ranks_per_node": 4, "tensor_parallel": 3}},
            "3 x pipeline_parallel 1 = 3 does not divide .* choose degrees whose product is 1, 2 or 4$",
        ),
        ({"parallelism": {"tensor_parallel": 2}}, "ranks_per_node"),
        ({"cluster__nodes": 2, "parallelism": {"ranks_per_node": 2, "tensor_parallel": 4}}, "would span nodes"),
        (
            {"cluster__instance_type": "p5.48xlarge", "parallelism": {"ranks_per_node": 64}},
            "ranks_per_node: 64 .* 8 ranks of p5.48xlarge; set it to 8",
        ),
    ],
)
def test_impossible_degrees_show_their_arithmetic(make_run: MakeRun, overrides: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        _ = make_run(**overrides).plan
