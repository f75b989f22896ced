"""Packed documents: families whose loss and gradients are those of the documents alone, and the runs refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hyperpod_ft.data.packing import IGNORED
from hyperpod_ft.engines.batches import Batch
from hyperpod_ft.engines.torch.model import attention, language_model
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.families import SEPARATING_FAMILIES, why_not_packed
from hyperpod_ft.planning.layout import Degrees
from hyperpod_ft.planning.model_fit import check_model_directory
from hyperpod_ft.planning.parallelism import degrees_of
from hyperpod_ft.planning.torch.limits import check_family, check_model_config
from tests.conftest import MakeRun
from tests.unit.tiny_families import SIZES

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
# shorter than the documents, in one layer where a family has both kinds
WINDOW = {"sliding_window": 4}
BOTH = WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}
GPT2_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
OWN_SETTINGS: dict[str, dict[str, Any]] = {
    "cohere": {"logit_scale": 0.5},
    "cohere2": BOTH | {"logit_scale": 0.5},
    "cwm": BOTH,
    "exaone4": BOTH,
    "flex_olmo": EXPERTS,
    "gemma2": BOTH | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text": BOTH | {"final_logit_softcapping": 3.0},
    "glm4_moe": EXPERTS | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "gpt2": GPT2_DROPOUT,
    "gpt_bigcode": GPT2_DROPOUT,
    "gptj": GPT2_DROPOUT | {"rotary_dim": 4},
    "granite": {"logits_scaling": 4.0, "attention_multiplier": 0.5},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 4.0},
    "granitemoeshared": {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16},
    "ministral": BOTH,
    "ministral3": WINDOW,
    "mistral": WINDOW,
    "mixtral": WINDOW | {"num_local_experts": 4},
    "olmo3": BOTH,
    "olmoe": EXPERTS,
    "phi3": WINDOW,
    "qwen2": WINDOW | {"use_sliding_window": True, "max_window_layers": 1},
    "qwen3": WINDOW | {"use_sliding_window": True, "max_window_layers": 1},
    "qwen3_moe": EXPERTS,
    "qwen2_moe": EXPERTS | WINDOW | {"use_sliding_window": True, "shared_expert_intermediate_size": 16},
    "seed_oss": {"residual_dropout": 0.0},
    "starcoder2": WINDOW | {"embedding_dropout": 0.0, "residual_dropout": 0.0},
    "vaultgemma": BOTH | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
}
LENGTHS = (7, 11, 3, 9)
Result = dict[str, torch.Tensor]


def model_of(family: str, implementation: str | None) -> PreTrainedModel:
    torch.manual_seed(0)
    # some families drop out by default: packed and alone would drop other elements
    values = SIZES | {"attention_dropout": 0.0, "hidden_dropout": 0.0} | OWN_SETTINGS.get(family, {})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        AutoConfig.for_model(family, **values), attn_implementation=implementation
    )
    for parameter in model.train().parameters():
        if parameter.ndim > 1:  # large enough that attention matters
            torch.nn.init.normal_(parameter, std=0.3)
        elif parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.1)
    return model


def documents() -> list[torch.Tensor]:
    return list(
        torch.randint(3, SIZES["vocab_size"], (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1)).split(
            LENGTHS, 1
        )
    )


def gradients(model: PreTrainedModel, loss: torch.Tensor) -> Result:
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def alone(family: str) -> Result:
    """Loss and gradients of each document in a batch of its own, by transformers: its attention, logits and loss."""
    model = model_of(family, "eager")
    loss = torch.zeros(())
    for ids in documents():
        logits = model(input_ids=ids, position_ids=torch.arange(ids.shape[1])[None], use_cache=False).logits
        loss = loss + torch.nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:], reduction="sum")
    return gradients(model, loss)


def packed(family: str, device: str) -> Result:
    """The same of all documents in one row, by the engine, as on a device of that type."""
    model = model_of(family, attention.NAME)
    language_model.return_loss(model)
    ids, positions = torch.cat(documents(), 1), torch.cat([torch.arange(length) for length in LENGTHS])[None]
    batch = Batch(ids, torch.where(positions == 0, IGNORED, ids), positions)
    return gradients(model, model(**inputs_as_on(device, batch)))


def inputs_as_on(device: str, batch: Batch) -> dict[str, torch.Tensor]:
    if device == "cpu":
        return language_model.inputs(batch, torch.device("cpu"))
    on_meta = language_model.inputs(batch, torch.device("meta"))
    targets = torch.nn.functional.pad(batch.labels[:, 1:], (0, 1), value=IGNORED).flatten()
    values = {
        "input_ids": batch.input_ids,
        "position_ids": batch.position_ids,
        "targets": targets,
        "attention_mask": attention.document_numbers(batch.position_ids),
    }
    assert {name: tensor.shape for name, tensor in on_meta.items()} == {name: t.shape for name, t in values.items()}
    return values


def difference(found: Result, expected: Result) -> float:
    """The largest, relative to the largest value of its tensor."""
    assert found.keys() == expected.keys()
    # a gradient that is zero but for rounding, as of a key's bias, has no scale of its own
    return max(
        float((found[name] - value).abs().max() / value.abs().max().clamp_min(1e-2)) for name, value in expected.items()
    )


ONE_RANK = Degrees(1, 1, 1, 1)


@pytest.mark.parametrize("family", sorted(SEPARATING_FAMILIES))
def test_packed_documents_train_as_they_do_alone(family: str) -> None:
    expected = alone(family)
    assert difference(packed(family, "cpu"), expected) < 3e-5
    assert difference(packed(family, "one with fixed shapes"), expected) < 3e-5


def test_a_family_with_its_window_in_a_mask_is_refused(make_run: MakeRun) -> None:
    """Its documents would be apart, but its attention would see beyond its window."""
    assert difference(packed("qwen2_moe", "cpu"), alone("qwen2_moe")) > 0.1
    with pytest.raises(UserError, match="qwen2_moe"):
        check_family(make_run(dataset__packing="bfd").config, ONE_RANK, "qwen2_moe")


@pytest.mark.parametrize("family", ["codegen", "opt", "bloom", "gpt_oss", "jamba", "qwen3_next", ""])
def test_other_families_are_refused(make_run: MakeRun, family: str) -> None:
    with pytest.raises(UserError, match=family or "none"):
        check_family(make_run(dataset__packing="bfd").config, ONE_RANK, family)


@pytest.mark.parametrize("packing", ["bfd", "wrapped"])
def test_a_model_is_refused_when_its_config_is_read(make_run: MakeRun, tmp_path: Path, packing: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "opt"}))
    config = make_run(dataset__packing=packing).config
    with pytest.raises(UserError) as raised:
        check_model_directory(config, degrees_of(config), tmp_path)
    assert all(fact in str(raised.value) for fact in ("model.source", "opt", "dataset.packing to auto"))


def test_pairs_need_a_family_that_is_known(make_run: MakeRun) -> None:
    """Even without packing, both documents of a pair are in one row."""
    config = make_run(training__objective="dpo", dataset__format="preference", dataset__packing="none").config
    check_family(config, ONE_RANK, "llama")
    with pytest.raises(UserError, match=r"training\.objective: dpo .* gpt_neo; choose a model of another family"):
        check_family(config, ONE_RANK, "gpt_neo")


@pytest.mark.parametrize("packing", ["none", "auto"])
def test_without_packing_every_family_may_train(make_run: MakeRun, tmp_path: Path, packing: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "opt"}))
    config = make_run(dataset__packing=packing, parallelism={"ranks_per_node": 2, "tensor_parallel": 1}).config
    fit = check_model_directory(config, degrees_of(config), tmp_path)
    assert fit.memory is None and bool(fit.not_packed) == (packing == "auto")


def test_the_model_decides_how_examples_fill_rows() -> None:
    refused = {family for family in ("llama", "t5", "opt", "") if why_not_packed("torch", family)}
    assert refused == {"opt", ""}
    assert not why_not_packed("neuron", "opt")


def test_a_routers_balancing_loss_is_refused_with_all_parameters(make_run: MakeRun) -> None:
    model = {"model_type": "qwen3_moe", "output_router_logits": True}
    with pytest.raises(UserError, match="balancing loss"):
        check_model_config(make_run(training__method="full").config, ONE_RANK, model)
    check_model_config(make_run().config, ONE_RANK, model)


def test_the_documented_families_are_those_that_are_packed() -> None:
    page = (Path(__file__).resolve().parents[4] / "docs" / "parallelism.md").read_text(encoding="utf-8")
    section = page.split("### Packing\n")[1].split("\n#")[0]
    listed = section.split("config.json:")[1].split("\n\n")[0]
    assert set(listed.replace("`", "").removesuffix(".").replace(",", " ").split()) == SEPARATING_FAMILIES


def test_the_documented_number_of_families_is_that_of_those_that_are_packed() -> None:
    page = (Path(__file__).resolve().parents[4] / "docs" / "engines.md").read_text(encoding="utf-8")
    assert f" {len(SEPARATING_FAMILIES)} families with packing" in page
