"""Degrees that a run file leaves to the kit."""

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.automatic.choice import AllowedDegrees, Proposal, propose
from hyperpod_ft.planning.model_fit import check_memory, check_trainable
from hyperpod_ft.planning.model_shape import model_shape
from hyperpod_ft.planning.parallelism import degrees_of
from hyperpod_ft.planning.torch import sharding
from hyperpod_ft.runs.run import Run
from scripts.memory_table import LLAMA_3_8B, LLAMA_3_70B, QWEN3_8B
from tests.conftest import MakeRun
from tests.unit.published_mixtures import PUBLISHED

GPTJ_6B = {"model_type": "gptj", "n_embd": 4096, "n_head": 16, "n_layer": 28, "n_positions": 2048, "vocab_size": 50400}
MIXTRAL = PUBLISHED["mistralai/Mixtral-8x7B-v0.1"][0]
QWEN3_30B = PUBLISHED["Qwen/Qwen3-30B-A3B"][0]
GPT_OSS = PUBLISHED["openai/gpt-oss-20b"][0]
FULL = {"method": "full", "activation_checkpointing": "full"}
CHECKPOINTED = {"activation_checkpointing": "full"}


def config(
    instance: str,
    nodes: int = 1,
    length: int = 2048,
    training: dict[str, Any] | None = None,
    lora: dict[str, Any] | None = None,
    **parallelism: Any,
) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "auto",
            "engine": "torch",
            "cluster": {"instance_type": instance, "nodes": nodes},
            "model": {"source": "any/model"},
            "dataset": {"source": "any/data", "format": "dolly", "max_length": length},
            "training": training or {},
            "lora": lora or {},
            "parallelism": {"degrees": "auto"} | parallelism,
        }
    )


def allowed(proposal: Proposal) -> list[AllowedDegrees]:
    return [proposal.chosen, *proposal.slower]


@pytest.mark.parametrize(
    ("given", "model_config", "degrees", "sharding"),
    [
        (config("p4d.24xlarge"), LLAMA_3_8B, "dp 8 x tp 1", "replicated"),
        (config("p5.48xlarge", 4, training=FULL), LLAMA_3_70B, "dp 32 x tp 1", "zero3 over 32 ranks"),
        (config("p5.48xlarge", training=CHECKPOINTED), LLAMA_3_70B, "dp 4 x tp 2", "replicated"),
        # activations of rows of 131,072 tokens are more than a rank has room for
        (config("p4d.24xlarge", 1, 131_072, CHECKPOINTED), LLAMA_3_8B, "dp 4 x cp 2 x tp 1", "zero3 over 8 ranks"),
        # PCIe instead of NVLink, 24 GiB
        (config("g5.48xlarge", 2, training=FULL), LLAMA_3_8B, "dp 16 x tp 1", "zero3 over 16 ranks"),
        # what is given is kept
        (config("p5.48xlarge", lora={"quantization": "nf4"}), LLAMA_3_70B, "dp 4 x cp 2 x tp 1", "replicated"),
        (config("p5.48xlarge", 1, sharding="zero3"), LLAMA_3_8B, "dp 8 x tp 1", "zero3 over 8 ranks"),
        # on CPUs, what communicates least
        (config("local", ranks_per_node=4), LLAMA_3_8B, "dp 4 x tp 1", "replicated"),
        # mixtures are divided by rows and by sharding
        (config("p5.48xlarge", training=CHECKPOINTED), MIXTRAL, "dp 8 x tp 1", "zero3 over 8 ranks"),
        (config("p4d.24xlarge", 1, 131_072, CHECKPOINTED), QWEN3_30B, "dp 4 x cp 2 x tp 1", "zero3 over 8 ranks"),
        (config("p5.48xlarge", 4, training=FULL), QWEN3_30B, "dp 16 x cp 2 x tp 1", "zero2 over 32 ranks"),
    ],
)
def test_known_cases(given: RunConfig, model_config: dict[str, Any], degrees: str, sharding: str) -> None:
    chosen = propose(given, model_config).chosen
    assert (str(chosen.degrees), str(chosen.sharding)) == (degrees, sharding)


def random_configs(count: int) -> list[tuple[RunConfig, dict[str, Any]]]:
    generator = random.Random(0)
    choose = generator.choice
    found = []
    while len(found) < count:
        training = {
            "method": choose(["lora", "full"]),
            "activation_checkpointing": choose(["none", "selective", "full"]),
            "micro_batch_size": choose([1, 2, 4]),
            "gradient_accumulation_steps": choose([1, 2, 8]),
            "precision": choose(["bf16", "fp32"]),
        }
        parallelism = choose([{}, {}, {"sharding": "zero2"}, {"shard_ranks": 4}, {"offload": "parameters"}])
        instance = choose(["p4d.24xlarge", "p5.48xlarge", "p5en.48xlarge", "g5.48xlarge"])
        nodes, length = choose([1, 2, 3, 5, 16]), choose([2048, 3000, 32_768, 131_072])
        model_config = choose([LLAMA_3_8B, LLAMA_3_70B, QWEN3_8B, GPTJ_6B]) | choose([{}, {"num_key_value_heads": 6}])
        model_config |= choose([{}, {"rope_scaling": {"rope_type": "dynamic"}}])
        found.append((config(instance, nodes, length, training, **parallelism), model_config))
    return found


def test_what_is_proposed_is_never_refused() -> None:
    proposed = 0
    for given, model_config in random_configs(60):
        shape = model_shape(model_config)
        assert shape is not None
        try:
            proposal = propose(given, model_config)
        except UserError as error:
            assert "GiB" in str(error) and error.remedy, error
            continue
        for each in allowed(proposal):
            proposed += 1
            # as a run file with these degrees is read, planned and checked
            again = RunConfig.model_validate(each.config.model_dump())
            assert again == each.config and again.parallelism.degrees == "manual"
            degrees = degrees_of(again)
            assert degrees == each.degrees
            assert check_trainable(again, degrees, model_config) == shape
            memory = check_memory(again, degrees, shape)
            assert memory and memory.total == each.needed
            assert sharding.choose_sharding(again, degrees, shape) == each.sharding
        times = [each.tokens_per_second for each in allowed(proposal)]
        assert times == sorted(times, reverse=True)
    assert proposed > 50, "or this test shows little"


def test_a_choice_takes_no_time() -> None:
    given = config("p5.48xlarge", 16, training=FULL)
    times = []
    for _ in range(3):
        begun = time.process_time()
        propose(given, LLAMA_3_70B)
        times.append(time.process_time() - begun)
    assert min(times) < 0.5


def test_refused_degrees_say_why() -> None:
    proposal = propose(config("p5.48xlarge", training=CHECKPOINTED, sharding="replicated"), LLAMA_3_70B)
    reasons = {str(degrees): reason for degrees, reason in proposal.refused}
    assert reasons["dp 8 x tp 1"].startswith("needs ") and reasons["dp 8 x tp 1"].endswith(" of 72.0 GiB (replicated)")
    assert len(allowed(proposal)) + len(reasons) <= 8
    values = json.loads(json.dumps(proposal.as_dict()))
    assert values["layouts"][0]["degrees"] == str(proposal.chosen.degrees)
    assert values["layouts"][0]["tokens_per_second"] > 0


def test_nothing_fits() -> None:
    with pytest.raises(UserError) as raised:
        propose(config("p4d.24xlarge", training=FULL), LLAMA_3_70B)
    facts = (
        "possible layouts fits; ",
        "dp 1 x cp 2 x tp 4",
        "has 36.0 of its 40 GiB",
        "parallelism.offload: optimizer",
    )
    assert all(fact in str(raised.value) for fact in facts), raised.value


def test_the_only_layout_does_not_fit() -> None:
    training = {"method": "full", "micro_batch_size": 64}
    with pytest.raises(UserError) as raised:
        propose(config("p4d.24xlarge", training=training, ranks_per_node=1), GPTJ_6B)
    assert "degrees: the only possible layout does not fit: dp 1 x tp 1, training.method full: needs" in str(
        raised.value
    )


def test_a_schedule_is_for_pipelines() -> None:
    """Those without one are proposed as if it had not been given."""
    given = config("p4d.24xlarge", pipeline_schedule="interleaved", virtual_pipeline_parallel=3)
    chosen = propose(given, LLAMA_3_8B).chosen
    assert str(chosen.degrees) == "dp 8 x tp 1"
    assert (chosen.config.parallelism.pipeline_schedule, chosen.config.parallelism.virtual_pipeline_parallel) == (
        "1f1b",
        2,
    )


def test_nothing_is_possible() -> None:
    """The error is that of the run file without auto."""
    with pytest.raises(UserError, match=r"^parallelism.ranks_per_node: required"):
        propose(config("local"), LLAMA_3_8B)
    with pytest.raises(UserError, match="the speed of opt models cannot be estimated"):
        propose(config("p5.48xlarge"), {"model_type": "opt"})


@pytest.mark.parametrize("key", ["tensor_parallel", "pipeline_parallel", "context_parallel"])
def test_a_degree_cannot_be_given_too(key: str) -> None:
    with pytest.raises(UserError, match=f"parallelism.{key}: parallelism.degrees auto sets it"):
        Run.of(config("p5.48xlarge", **{key: 2}))


def test_engine_neuron_has_no_estimate(make_run: MakeRun) -> None:
    neuron = {"engine": "neuron", "cluster__instance_type": "trn1.32xlarge"}
    with pytest.raises(UserError, match=r"parallelism\.degrees: only engine torch supports it"):
        make_run(**neuron, parallelism={"degrees": "auto"})


def test_the_choice_is_frozen(make_run: MakeRun, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA_3_8B))
    common = {
        "cluster__instance_type": "p4d.24xlarge",
        "model": {"source": str(tmp_path / "model")},
        "dataset__max_length": 131_072,
        "training__activation_checkpointing": "full",
    }
    run = make_run(**common, parallelism={"degrees": "auto"})
    assert run.proposal and run.plan.degrees == run.proposal.chosen.degrees
    run.paths.directory.mkdir(parents=True)
    run.freeze()
    opened = Run.open(run.paths.directory)
    assert opened == run and opened.proposal is None
    assert opened.config.parallelism.context_parallel == opened.plan.degrees.context_parallel == 2
    # the same run as with these degrees in the run file
    assert make_run(**common, parallelism={"context_parallel": 2}).plan == run.plan


def test_config_json_must_be_there(make_run: MakeRun) -> None:
    with pytest.raises(UserError, match=r"auto needs the config.json of some/model, .* hyperpod-ft plan"):
        make_run(model={"source": "some/model"}, parallelism={"degrees": "auto", "ranks_per_node": 2})


@pytest.mark.parametrize("nodes", [1, 4])
def test_one_gpu_that_has_no_link_to_another(nodes: int) -> None:
    chosen = propose(config("g5.xlarge", nodes, training=CHECKPOINTED), LLAMA_3_8B).chosen
    assert chosen.degrees.world_size == nodes and chosen.tokens_per_second > 0


def test_rows_of_a_type_that_cannot_share_them_are_not_divided() -> None:
    proposal = propose(config("p5.48xlarge", training=CHECKPOINTED), GPT_OSS)
    assert all(each.degrees.context_parallel == 1 for each in allowed(proposal))
    assert any("parallelism.context_parallel" in reason for _, reason in proposal.refused)


def test_a_mixture_is_as_fast_as_the_experts_that_a_token_passes_through() -> None:
    given = config("p5.48xlarge", training=CHECKPOINTED, sharding="replicated")
    few, many = (propose(given, QWEN3_30B | {"num_experts_per_tok": used}).chosen for used in (8, 16))
    of_experts = 8 * 3 * 2048 * 768 * 48  # parameters, whose operations are twice as many
    assert many.time.compute - few.time.compute == pytest.approx(
        few.config.training.micro_batch_size * 2048 * of_experts * (2 + 2 + 2) / (989.5e12 * 0.4), rel=0.01
    )


def test_a_hybrid_is_not_chosen_for() -> None:
    with pytest.raises(UserError, match="the speed of qwen3_next models cannot be estimated"):
        propose(config("p5.48xlarge"), PUBLISHED["Qwen/Qwen3-Next-80B-A3B-Instruct"][0])
