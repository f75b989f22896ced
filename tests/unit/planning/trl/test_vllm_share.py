"""What vLLM takes of a GPU and of a run file where it samples the answers of a training."""

import re
from pathlib import Path
from typing import Any

import pytest

from hyperpod_ft.engines.trl.arguments import arguments
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.layout import Sharding
from hyperpod_ft.planning.memory import GIB, available
from hyperpod_ft.planning.pins import requirements
from hyperpod_ft.planning.trl import rules
from scripts.memory_table import LLAMA_3_8B
from tests.conftest import MakeRun
from tests.unit.config.run_files import refused
from tests.unit.planning.memory_estimates import estimated
from tests.unit.planning.trl.test_trl_settings import CONFIGS, OBJECTIVES, TRL

USED: dict[str, Any] = {"trl": {"use_vllm": True}}
GRPO = TRL | OBJECTIVES["grpo"]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"cluster__instance_type": "local", "parallelism__ranks_per_node": 1}, "use_vllm needs GPUs"),
        (OBJECTIVES["dpo"] | {"reward": []}, "'use_vllm' is not one of the settings"),
        ({"trl": {"use_vllm": True, "vllm_mode": "server"}}, "vllm_mode is not supported"),
        ({"trl": {"vllm_gpu_memory_utilization": 0.5}}, "has no effect without use_vllm"),
        ({"trl": {"use_vllm": True, "vllm_gpu_memory_utilization": 0.9}}, "vllm_gpu_memory_utilization is 0.9"),
        ({"trl": {"use_vllm": True, "vllm_gpu_memory_utilization": 0}}, "vllm_gpu_memory_utilization is 0"),
        ({"trl": {"use_vllm": True, "vllm_gpu_memory_utilization": "0.5"}}, "is '0.5', not of type float"),
        ({"trl": {"use_vllm": True, "generation_kwargs": {"typical_p": 0.9}}}, "generation_kwargs are transformers'"),
        ({"parallelism__sharding": "zero3"}, "has not been tried with trl.use_vllm"),
    ],
)
def test_what_cannot_be_with_vllm_is_refused_in_one_line(tmp_path: Path, changed: dict[str, Any], says: str) -> None:
    said = refused(tmp_path, **GRPO | USED | changed)
    assert says in said and len(said.splitlines()) == 1, said


@pytest.mark.parametrize("objective", ["grpo", "rloo", "distillation"])
def test_trl_is_told_where_vllm_runs(make_run: MakeRun, tmp_path: Path, objective: str) -> None:
    config = make_run(
        **TRL, **OBJECTIVES[objective], **USED, dataset__max_length=512, training__micro_batch_size=8
    ).config
    given = arguments(config, Sharding("replicated", 1), 10, tmp_path)
    settings = CONFIGS[objective](**given | {"bf16": False, "use_cpu": True})
    assert (settings.use_vllm, settings.vllm_mode, settings.vllm_tensor_parallel_size) == (True, "colocate", 1)
    assert (settings.vllm_max_model_length, settings.vllm_gpu_memory_utilization) == (512 + 256, config.vllm_share)


def test_its_share_is_not_the_trainings(make_run: MakeRun) -> None:
    """Adapters are added to weights in fp32, and keys and values of sampled answers are vLLM's."""
    long: dict[str, Any] = {"training__micro_batch_size": 64, "training__activation_checkpointing": "full"}
    long |= {"parallelism__sharding": "replicated"}
    without, beside = (make_run(**GRPO, **long, **given).config for given in ({}, USED))
    assert available(without) - available(beside) == pytest.approx(0.3 * 80 * GIB)
    smaller, larger = (estimated(config, LLAMA_3_8B) for config in (without, beside))
    of_a_layer = 218_112_000
    assert larger.weights - smaller.weights == pytest.approx(2 * 8_030_261_248 + 2 * of_a_layer)


def test_weights_in_fp32_are_cast_and_kept_for_the_backward_pass(make_run: MakeRun) -> None:
    short = {"training__micro_batch_size": 2, "training__gradient_accumulation_steps": 4}
    config = make_run(**GRPO, **USED, **short).config
    assert estimated(config, LLAMA_3_8B).total > available(config), "it would not fit"


def test_the_model_must_fit_into_its_share(make_run: MakeRun) -> None:
    trl = USED["trl"] | {"vllm_gpu_memory_utilization": 0.15}
    with pytest.raises(UserError, match=r"0\.15 is 12\.0 GiB of a GPU, and vLLM needs more than 15\.\d GiB"):
        estimated(make_run(**GRPO, trl=trl).config, LLAMA_3_8B)


def test_types_that_it_has_not_are_refused(make_run: MakeRun) -> None:
    config = make_run(**GRPO, **USED).config
    with pytest.raises(UserError, match="use_vllm has not been tried with models of type 'olmo2'"):
        estimated(config, LLAMA_3_8B | {"model_type": "olmo2"})


def test_modules_trained_whole_are_sampled_from_in_bf16(make_run: MakeRun) -> None:
    assert make_run(**GRPO, **USED, lora__modules_to_save=["lm_head"]).config.vllm_share


def test_its_environment_has_the_packages_of_the_other(make_run: MakeRun, tmp_path: Path) -> None:
    config = make_run(**GRPO, **USED).config
    assert "vllm" in rules.imports(config) and "VLLM_NO_USAGE_STATS" in rules.variables(config, tmp_path)
    pins, others = (requirements(rules.environment_name(each)) for each in (config, make_run(**GRPO).config))
    of_training = re.compile("(accelerate|datasets|peft|tokenizers|torch|transformers|trl)==")
    assert [pin for pin in pins if of_training.match(pin)] == [pin for pin in others if of_training.match(pin)]
    assert any(pin in rules.packages_remedy(config) for pin in {*pins} - {*others} if pin.startswith("vllm=="))
