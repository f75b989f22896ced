"""What a run may ask of a model by its certificate, and of an encoder-decoder or a mixture without one."""

from typing import Any

import pytest

from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.certificate import Certificate
from hyperpod_ft.planning.layout import Degrees
from hyperpod_ft.planning.torch.limits import check_model_config
from tests.conftest import MakeRun

ONE_RANK = Degrees(1, 1, 1, 1)
APART = "documents of a row see one another"


@pytest.mark.parametrize(
    ("overrides", "degrees", "words"),
    [
        ({"dataset__packing": "bfd"}, ONE_RANK, r"^dataset\.packing: bfd .*see one another; set it to auto$"),
        ({"dataset__packing": "wrapped"}, ONE_RANK, r"^dataset\.packing: wrapped .*see one another; set it to auto$"),
        ({}, Degrees(1, 2, 1, 1, 2), r"^parallelism\.context_parallel: .*see one another; set it to 1$"),
        (
            {"training__objective": "dpo", "dataset__format": "preference", "dataset__packing": "none"},
            ONE_RANK,
            r"^training\.objective: dpo .*see one another; choose a model of another type$",
        ),
    ],
)
def test_several_documents_or_ranks_in_a_row_are_refused(
    make_run: MakeRun, overrides: dict[str, Any], degrees: Degrees, words: str
) -> None:
    config = make_run(**overrides).config
    Certificate().check(config, degrees)
    with pytest.raises(UserError, match=words):
        Certificate(APART).check(config, degrees)


@pytest.mark.parametrize("packing", ["none", "auto"])
def test_without_packing_every_model_may_train(make_run: MakeRun, packing: str) -> None:
    Certificate(APART, not_proven=APART).check(make_run(dataset__packing=packing).config, ONE_RANK)


def test_ranks_divide_experts_only_where_that_is_proven(make_run: MakeRun) -> None:
    config, divided = make_run().config, Degrees(1, 2, 1, 1, expert_parallel=2)
    Certificate().check(config, divided)
    with pytest.raises(UserError, match=rf"^parallelism\.expert_parallel: {APART}; set it to 1$"):
        Certificate(not_proven=APART).check(config, divided)


@pytest.mark.parametrize("served", ["adapter", "merged"])
def test_an_endpoint_of_an_adapter_that_vllm_does_not_serve_is_refused(make_run: MakeRun, served: str) -> None:
    config = make_run(deploy={"instance_type": "g6.2xlarge", "model": served}).config
    Certificate().check(config, ONE_RANK)
    found = Certificate.of({"target_parameters": ["up_proj.weight"]})
    assert found
    if served == "merged":
        found.check(config, ONE_RANK)
        return
    with pytest.raises(UserError, match=r"^deploy\.model: [^\n]* for up_proj\.weight; set it to merged$"):
        found.check(config, ONE_RANK)


def test_damaged_facts_are_no_certificate() -> None:
    assert Certificate.of({"not_packed": APART}) == Certificate(APART)
    assert Certificate.of({"not_packed": 3}) is None


@pytest.mark.parametrize(
    ("overrides", "degrees", "words"),
    [
        ({}, Degrees(1, 2, 1, 1, 2), r"^parallelism\.context_parallel: .*; set it to 1, or output_router_logits"),
        ({"cluster__instance_type": "trn2.48xlarge"}, ONE_RANK, r"^model\.source: .* on trn2; use a GPU"),
        ({}, Degrees(1, 2, 1, 2), r"^parallelism\.pipeline_parallel: "),
        ({}, Degrees(1, 2, 2, 1), r"^parallelism\.tensor_parallel: "),
    ],
)
def test_where_a_routers_balancing_loss_is_refused(
    make_run: MakeRun, overrides: dict[str, Any], degrees: Degrees, words: str
) -> None:
    model = {"model_type": "qwen3_moe", "output_router_logits": True}
    for method in ("full", "lora"):
        check_model_config(make_run(training__method=method).config, ONE_RANK, model)
        with pytest.raises(UserError, match=words):
            check_model_config(make_run(training__method=method, **overrides).config, degrees, model)
