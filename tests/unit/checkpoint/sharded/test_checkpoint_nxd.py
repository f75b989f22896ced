"""Checkpoints of optimum-neuron: genuine ones, and what comes back from every layout."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file
from torch import Tensor

from hyperpod_ft.checkpoint.sharded.nxd import rank_files
from hyperpod_ft.checkpoint.sharded.sharded import ShardedAdapter, open_checkpoint
from hyperpod_ft.checkpoint.tensors.logical_tensor import Piece
from tests.unit import genuine_checkpoints, nxd_adapters, nxd_files, nxd_sharder, tensor_values
from tests.unit.checkpoint.sharded.nxd_checkpoints import make_adapter, make_model
from tests.unit.genuine_checkpoints import Genuine
from tests.unit.nxd_models import PROJECTIONS, Layout, Lora, Model
from tests.unit.tensor_values import different_copies, gather

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("genuine", genuine_checkpoints.ALL, ids=str)
def test_a_genuine_checkpoint_is_what_upstream_makes_of_it(genuine: Genuine) -> None:
    found = open_checkpoint(genuine.checkpoint)
    tensors = found.model
    if genuine.lora:
        (adapter,) = found.adapters
        assert adapter.name == "default" and not found.model and found.files is None
        assert adapter.config == sorted_names(json.loads((genuine.consolidated / "adapter_config.json").read_text()))
        tensors = adapter.tensors
    else:
        assert not found.adapters and found.files == genuine.checkpoint
    assert found.directory == genuine.checkpoint
    assert_equal({tensor.name: gather(tensor) for tensor in tensors}, load_file(genuine.weights))
    differing = {tensor.name for tensor in tensors if different_copies(tensor)}
    if genuine.diverged:
        # all that every rank holds whole: lora_A of q, k, v, gate and up, lora_B of o and down
        assert len(differing) == 7 * genuine.model.layers
        assert all("lora_A" in tensor or "lora_B" in tensor for tensor in differing)
    else:
        assert not differing


@pytest.mark.parametrize("genuine", genuine_checkpoints.SOUND, ids=str)
def test_the_sharder_of_these_tests_writes_what_upstream_does(genuine: Genuine, tmp_path: Path) -> None:
    weights = load_file(genuine.weights)
    if genuine.lora:
        full, adapter = load_file(genuine.base / "model.safetensors"), [(Lora(r=4, alpha=8), weights)]
        saved = nxd_files.save_adapters(tmp_path, genuine.model, genuine.layout, full, adapter)
    else:
        saved = nxd_files.save_model(tmp_path, genuine.model, genuine.layout, weights)
    made = saved / genuine.shards.relative_to(genuine.checkpoint)
    ours = {path.relative_to(made) for path in made.rglob("*")}
    theirs = {path.relative_to(genuine.shards) for path in genuine.shards.rglob("*") if "optim" not in path.parts}
    assert ours == theirs
    for file in sorted(made.glob("mp_metadata*.json")):
        mine, real = json.loads(file.read_text()), json.loads((genuine.shards / file.name).read_text())
        assert mine["parameters"] == real["parameters"]
        key = "model_weight_transformation_specs"
        assert sorted(mine[key], key=str) == sorted(real[key], key=str)
    for file in sorted((made / "model").glob("*pp_rank_??.pt")):
        stage = json.loads((made / f"mp_metadata_pp_rank_{int(file.stem[-2:])}.json").read_text())["parameters"]
        here = {name.replace(".default", "") for name in stage}
        mine_file, real_file = rank_files.read(file), rank_files.read(genuine.shards / "model" / file.name)
        assert mine_file.contents.keys() == real_file.contents.keys()
        for key in mine_file.contents.keys() & here:
            assert torch.equal(_values(mine_file, key), _values(real_file, key)), key


def _values(file: rank_files.RankFile, name: str) -> Tensor:
    shard = file.shard(name)
    piece = Piece(
        shard.file, shard.tensor.offset, (0,) * len(shard.tensor.shape), shard.tensor.shape, shard.tensor.strides
    )
    return tensor_values.values(piece, shard.tensor.dtype)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Model, Layout]:
    tensor_parallel = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    pipeline_parallel = draw(st.integers(1, 4))
    key_heads = draw(st.sampled_from([1, 2, 3, 4, 8]))
    multiplier = draw(st.sampled_from([None, 1, 2, 4]))
    sharder = nxd_sharder.Sharder(Model(key_heads=key_heads), Layout(tensor_parallel, multiplier=multiplier))
    slots = key_heads * sharder.multiplier
    if slots % tensor_parallel or tensor_parallel % sharder.multiplier or key_heads % (slots // tensor_parallel):
        # what neuronx-distributed refuses to train with (GQAQKVColumnParallelLinear.__init__)
        multiplier = tensor_parallel if tensor_parallel % key_heads else tensor_parallel // key_heads
        slots = key_heads * multiplier
    heads = slots * draw(st.integers(1, 2))
    heads *= 1 if heads % tensor_parallel == 0 else tensor_parallel
    model = Model(
        heads=heads,
        key_heads=key_heads,
        head_size=draw(st.integers(1, 3)),
        intermediate=tensor_parallel * draw(st.integers(1, 3)),
        vocabulary=tensor_parallel * draw(st.integers(1, 3)),
        layers=draw(st.integers(pipeline_parallel, 4)),
        hidden=draw(st.integers(1, 5)),
        tied=draw(st.booleans()),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
    )
    xser, fuse_qkv = draw(st.booleans()), draw(st.booleans())
    return model, Layout(tensor_parallel, pipeline_parallel, xser, fuse_qkv, multiplier)


adapters = st.builds(
    Lora,
    r=st.integers(1, 3),
    alpha=st.sampled_from([1, 4, 16]),
    targets=st.sampled_from(
        [
            PROJECTIONS,
            ATTENTION,
            ("o_proj",),
            ("down_proj",),
            ("gate_proj", "up_proj"),
            (*PROJECTIONS, "embed_tokens"),
            (*ATTENTION, "embed_tokens", "lm_head"),
            ("lm_head",),
        ]
    ),
    modules_to_save=st.sampled_from([(), ("norm",)]),
    rank_pattern=st.sampled_from([{}, {"o_proj": 4}, {"gate_up_proj": 5, "down_proj": 1}]),
    alpha_pattern=st.sampled_from([{}, {"o_proj": 2}, {"gate_up_proj": 32}]),
    rslora=st.booleans(),
)

several = settings(deadline=None, max_examples=30, database=None, suppress_health_check=[HealthCheck.too_slow])


@several
@given(layouts())
def test_a_model_comes_back_from_every_layout(given_layout: tuple[Model, Layout]) -> None:
    model, layout = given_layout
    full = model.random()
    with TemporaryDirectory() as work:
        found = open_checkpoint(nxd_files.save_model(Path(work) / "checkpoint-4", model, layout, full))
        assert_equal({tensor.name: gather(tensor) for tensor in found.model}, full)
        assert not any(different_copies(tensor) for tensor in found.model)
        norm = next(tensor for tensor in found.model if tensor.name == "model.norm.weight")
        assert len(norm.replicas) == layout.tensor_parallel - 1


@several
@given(layouts(), adapters, st.booleans(), st.booleans(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_adapters_come_back_from_every_layout(
    given_layout: tuple[Model, Layout], lora: Lora, another: bool, bias: bool, dtype: torch.dtype
) -> None:
    model, layout = given_layout
    if bias and "embed_tokens" not in lora.targets:
        lora = dataclasses.replace(lora, bias=True)
    loras = [lora, Lora("other", r=2, targets=("q_proj", "k_proj", "v_proj", "down_proj"))][: 1 + another]
    made = [
        (lora, nxd_adapters.random_adapter(model, layout, lora, dtype, seed))
        for seed, lora in enumerate(loras, start=1)
    ]
    with TemporaryDirectory() as work:
        saved = nxd_files.save_adapters(Path(work) / "checkpoint-4", model, layout, model.random(), made)
        found = open_checkpoint(saved)
        assert [adapter.name for adapter in found.adapters] == [lora.name for lora in loras]
        for adapter, (lora, tensors) in zip(found.adapters, made, strict=True):
            assert_equal({tensor.name: gather(tensor) for tensor in adapter.tensors}, tensors)
            assert not any(different_copies(tensor) for tensor in adapter.tensors)
            assert_scales(nxd_sharder.Sharder(model, layout), lora, adapter)


def assert_scales(sharder: nxd_sharder.Sharder, lora: Lora, adapter: ShardedAdapter) -> None:
    """PEFT gives each module of Hugging Face's model the rank and alpha that it was trained with."""
    config = adapter.config
    for module in (module for stage in sharder.stages() for module in stage):
        for linear in module.linears if nxd_adapters.targeted(module, lora) else ():
            patterns = (config["rank_pattern"], config["r"]), (config["alpha_pattern"], config["lora_alpha"])
            peft = tuple(pattern.get(get_pattern_key(pattern, linear), default) for pattern, default in patterns)
            assert peft == nxd_adapters.trained_with(module, lora), linear
    assert {key: value for key, value in config.items() if not key.endswith("pattern")} == {
        key: value for key, value in sorted_names(nxd_adapters.peft_config(lora)).items() if not key.endswith("pattern")
    }


def sorted_names(config: dict[str, Any]) -> dict[str, Any]:
    return config | {"target_modules": sorted(config["target_modules"])}


def test_the_order_of_a_set_of_names_is_not_the_adapters(tmp_path: Path) -> None:
    """PEFT keeps target_modules in a set, whose order differs from one process to the next."""
    targets = Lora().targets
    first, second = (
        make_adapter(tmp_path / name, lora=Lora(targets=order)).adapters[0].config
        for name, order in (("first", targets), ("second", targets[::-1]))
    )
    assert list(first["target_modules"]) == list(second["target_modules"])


def test_patterns_stay_as_they_are_where_they_mean_the_same(tmp_path: Path) -> None:
    lora = Lora(rank_pattern={"o_proj": 3}, alpha_pattern={"down_proj": 8, "o_proj": 6})
    config = make_adapter(tmp_path, lora=lora).adapters[0].config
    assert (config["rank_pattern"], config["alpha_pattern"]) == (lora.rank_pattern, lora.alpha_pattern)


def test_more_than_a_hundred_ranks_go_by_number(tmp_path: Path) -> None:
    model = Model(heads=128, key_heads=8, head_size=1, intermediate=128, vocabulary=128, layers=1, hidden=2)
    full = model.random()
    found = open_checkpoint(nxd_files.save_model(tmp_path / "checkpoint-4", model, Layout(128, xser=False), full))
    assert_equal({tensor.name: gather(tensor) for tensor in found.model}, full)
    key = next(tensor for tensor in found.model if tensor.name.endswith("k_proj.weight"))
    assert (len(key.pieces), len(key.replicas)) == (8, 120)


def test_projections_that_were_fused_each_have_their_copy_of_lora_a(tmp_path: Path) -> None:
    tensors = {tensor.name: tensor for tensor in make_adapter(tmp_path).adapters[0].tensors}
    mlp = "base_model.model.model.layers.0.mlp"
    gate, up = tensors[f"{mlp}.gate_proj.lora_A.weight"], tensors[f"{mlp}.up_proj.lora_A.weight"]
    assert gate.pieces == up.pieces and gate.replicas == up.replicas


def test_a_module_saved_whole_is_cut_like_the_one_it_copies(tmp_path: Path) -> None:
    lora = Lora(targets=("q_proj", "k_proj", "v_proj"), modules_to_save=("lm_head", "embed_tokens"))
    found = make_adapter(tmp_path, lora=lora)
    name = "base_model.model.lm_head.weight"
    (tensor,) = (tensor for tensor in found.adapters[0].tensors if tensor.name == name)
    assert tensor.shape == (16, 6) and len(tensor.pieces) == 2


def test_the_base_embedding_stays_out_of_the_adapter(tmp_path: Path) -> None:
    found = make_adapter(tmp_path, lora=Lora(targets=("embed_tokens", "lm_head")))
    names = {tensor.name for tensor in found.adapters[0].tensors}
    assert names == {
        "base_model.model.model.embed_tokens.lora_embedding_A",
        "base_model.model.model.embed_tokens.lora_embedding_B",
        "base_model.model.lm_head.lora_A.weight",
        "base_model.model.lm_head.lora_B.weight",
    }


@pytest.mark.parametrize("inner", ["", "adapter_default", "adapter_default/adapter_shards"])
def test_any_directory_of_a_lora_checkpoint_opens_it(tmp_path: Path, inner: str) -> None:
    make_adapter(tmp_path)
    found = open_checkpoint(tmp_path / "checkpoint-4" / inner)
    assert found.directory == tmp_path / "checkpoint-4" and len(found.adapters) == 1


@pytest.mark.parametrize("inner", ["", "shards"])
def test_any_directory_of_a_full_checkpoint_opens_it(tmp_path: Path, inner: str) -> None:
    make_model(tmp_path)
    found = open_checkpoint(tmp_path / "checkpoint-4" / inner)
    assert found.directory == found.files == tmp_path / "checkpoint-4" and found.model


def test_one_of_several_adapters_can_be_opened_alone(tmp_path: Path) -> None:
    model, layout = Model(), Layout(2)
    loras = [Lora("b"), Lora("default"), Lora("a")]
    made = [(lora, nxd_adapters.random_adapter(model, layout, lora, torch.float32)) for lora in loras]
    directory = nxd_files.save_adapters(tmp_path / "checkpoint-4", model, layout, model.random(), made)
    assert [adapter.name for adapter in open_checkpoint(directory).adapters] == ["default", "a", "b"]
    assert [adapter.name for adapter in open_checkpoint(directory / "adapter_a").adapters] == ["a"]


@pytest.mark.parametrize(("stages", "copies"), [(1, 2), (2, 4), (3, 4)])
def test_tied_weights_are_one_tensor_whose_copies_are_known(tmp_path: Path, stages: int, copies: int) -> None:
    found = make_model(tmp_path, Model(tied=True, layers=3), Layout(2, stages))
    (embedding,) = (tensor for tensor in found.model if "embed_tokens" in tensor.name or "lm_head" in tensor.name)
    assert (embedding.name, len(embedding.pieces)) == ("model.embed_tokens.weight", 2)
    assert len(embedding.replicas) == copies and not different_copies(embedding)
