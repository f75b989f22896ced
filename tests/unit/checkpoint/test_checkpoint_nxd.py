"""Checkpoints of optimum-neuron: genuine ones, every layout, and whatever must be refused."""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Mapping
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
from hyperpod_ft.errors import UserError
from tests.unit import genuine_checkpoints, nxd_shards
from tests.unit.genuine_checkpoints import Genuine
from tests.unit.nxd_shards import PROJECTIONS, Layout, Lora, Model, different_copies, gather

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


# Genuine checkpoints.


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
        saved = nxd_shards.save_adapters(tmp_path, genuine.model, genuine.layout, full, adapter)
    else:
        saved = nxd_shards.save_model(tmp_path, genuine.model, genuine.layout, weights)
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
    piece = nxd_shards.Piece(
        shard.file, shard.tensor.offset, (0,) * len(shard.tensor.shape), shard.tensor.shape, shard.tensor.strides
    )
    return nxd_shards.values(piece, shard.tensor.dtype)


# Every layout.


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Model, Layout]:
    tensor_parallel = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    pipeline_parallel = draw(st.integers(1, 4))
    key_heads = draw(st.sampled_from([1, 2, 3, 4, 8]))
    multiplier = draw(st.sampled_from([None, 1, 2, 4]))
    sharder = nxd_shards.Sharder(Model(key_heads=key_heads), Layout(tensor_parallel, multiplier=multiplier))
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

several = settings(deadline=None, max_examples=60, database=None, suppress_health_check=[HealthCheck.too_slow])


@several
@given(layouts())
def test_a_model_comes_back_from_every_layout(given_layout: tuple[Model, Layout]) -> None:
    model, layout = given_layout
    full = model.random()
    with TemporaryDirectory() as work:
        found = open_checkpoint(nxd_shards.save_model(Path(work) / "checkpoint-4", model, layout, full))
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
        (lora, nxd_shards.random_adapter(model, layout, lora, dtype, seed)) for seed, lora in enumerate(loras, start=1)
    ]
    with TemporaryDirectory() as work:
        saved = nxd_shards.save_adapters(Path(work) / "checkpoint-4", model, layout, model.random(), made)
        found = open_checkpoint(saved)
        assert [adapter.name for adapter in found.adapters] == [lora.name for lora in loras]
        for adapter, (lora, tensors) in zip(found.adapters, made, strict=True):
            assert_equal({tensor.name: gather(tensor) for tensor in adapter.tensors}, tensors)
            assert not any(different_copies(tensor) for tensor in adapter.tensors)
            assert_scales(nxd_shards.Sharder(model, layout), lora, adapter)


def assert_scales(sharder: nxd_shards.Sharder, lora: Lora, adapter: ShardedAdapter) -> None:
    """PEFT gives each module of Hugging Face's model the rank and alpha that it was trained with."""
    config = adapter.config
    for module in (module for stage in sharder.stages() for module in stage):
        for linear in module.linears if nxd_shards.targeted(module, lora) else ():
            patterns = (config["rank_pattern"], config["r"]), (config["alpha_pattern"], config["lora_alpha"])
            peft = tuple(pattern.get(get_pattern_key(pattern, linear), default) for pattern, default in patterns)
            assert peft == nxd_shards.trained_with(module, lora), linear
    assert {key: value for key, value in config.items() if not key.endswith("pattern")} == {
        key: value for key, value in sorted_names(nxd_shards.peft_config(lora)).items() if not key.endswith("pattern")
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
    found = open_checkpoint(nxd_shards.save_model(tmp_path / "checkpoint-4", model, Layout(128, xser=False), full))
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
    made = [(lora, nxd_shards.random_adapter(model, layout, lora, torch.float32)) for lora in loras]
    directory = nxd_shards.save_adapters(tmp_path / "checkpoint-4", model, layout, model.random(), made)
    assert [adapter.name for adapter in open_checkpoint(directory).adapters] == ["default", "a", "b"]
    assert [adapter.name for adapter in open_checkpoint(directory / "adapter_a").adapters] == ["a"]


# Refusals.


def make_model(directory: Path, model: Model | None = None, layout: Layout | None = None) -> Any:
    model, layout = model or Model(), layout or Layout(2, 2)
    return open_checkpoint(nxd_shards.save_model(directory / "checkpoint-4", model, layout, model.random()))


def make_adapter(
    directory: Path, model: Model | None = None, layout: Layout | None = None, lora: Lora | None = None
) -> Any:
    model, layout, lora = model or Model(), layout or Layout(2, 2), lora or Lora()
    tensors = nxd_shards.random_adapter(model, layout, lora, torch.float32)
    saved = nxd_shards.save_adapters(directory / "checkpoint-4", model, layout, model.random(), [(lora, tensors)])
    return open_checkpoint(saved)


SHARDS = Path("adapter_default/adapter_shards")
FIRST, SECOND = (SHARDS / f"model/dp_rank_00_tp_rank_0{rank}_pp_rank_00.pt" for rank in (0, 1))
METADATA = SHARDS / "mp_metadata_pp_rank_0.json"


def beside(file: Path, ending: str) -> Path:
    return file.with_name(file.name + ending)


def change(file: Path, edit: Callable[[Any], Any]) -> None:
    values = json.loads(file.read_text())
    edit(values)
    file.write_text(json.dumps(values))


def specs_of(values: Any) -> list[Any]:
    return [spec for specs in values["model_weight_transformation_specs"] for spec in specs["specs"]]


def all_partitions(values: Any, degree: int) -> None:
    for entry in values["parameters"].values():
        if entry["tensor_model_parallel"]:
            entry["num_partitions"] = degree


def resave(file: Path, edit: Callable[[dict[str, Tensor]], None]) -> None:
    state = torch.load(file, weights_only=True)
    edit(state)
    torch.save(state, file)


def rename_first(state: dict[str, Tensor]) -> None:
    name = next(iter(state))
    state[name + "_x"] = state.pop(name)


def shorten(file: Path, part: float) -> None:
    os.truncate(file, int(file.stat().st_size * part))


XSER: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no done": (lambda d: (d / SHARDS / "done").unlink(), "`done`"),
    "rank file": (lambda d: (d / SECOND).unlink(), "tp_rank_01_pp_rank_00.pt: is missing: .* tensor parallel 2"),
    "stage's files": (
        lambda d: [path.unlink() for path in (d / SHARDS / "model").glob("*pp_rank_01.pt")],
        "tp_rank_00_pp_rank_01.pt: is missing: .* pipeline parallel 2",
    ),
    "tensor file": (lambda d: (beside(d / SECOND, ".tensors") / "tensor_7.pt").unlink(), "tensor_7.pt: is missing"),
    "info": (lambda d: beside(d / SECOND, ".info.pt").unlink(), "info.pt: is missing"),
    "adapter config": (
        lambda d: (d / "adapter_default/adapter_config.json").unlink(),
        "adapter_config.json: is missing",
    ),
    "metadata": (lambda d: (d / METADATA).unlink(), "mp_metadata_pp_rank_0.json is missing"),
    "last stage's metadata": (
        lambda d: (d / SHARDS / "mp_metadata_pp_rank_1.json").unlink(),
        "pp_rank_01.pt: does not belong",
    ),
    "torn rank file": (lambda d: shorten(d / FIRST, 0.7), "truncated or damaged"),
    "empty rank file": (lambda d: shorten(d / FIRST, 0), "truncated or damaged"),
    "torn info": (lambda d: shorten(beside(d / FIRST, ".info.pt"), 0.5), "truncated or damaged"),
    "torn tensor file": (
        lambda d: shorten(beside(d / FIRST, ".tensors") / "tensor_3.pt", 0.8),
        "tensor_3.pt: cannot be read as torch.save writes",
    ),
    "torn metadata": (lambda d: shorten(d / METADATA, 0.5), "is damaged: "),
    "stale tensor file": (
        lambda d: shutil.copy(
            beside(d / FIRST, ".tensors") / "tensor_0.pt", beside(d / FIRST, ".tensors") / "tensor_999.pt"
        ),
        "tensor_999.pt: no rank refers to it",
    ),
    "tensor of another form": (
        lambda d: torch.save(torch.zeros(9), beside(d / FIRST, ".tensors") / "tensor_0.pt"),
        r"holds F32 \[9\], .* says F32",
    ),
    "no tensor": (
        lambda d: torch.save([1], beside(d / FIRST, ".tensors") / "tensor_0.pt"),
        "tensor_0.pt: does not hold a tensor",
    ),
    "another step": (
        lambda d: (d / "trainer_state.json").write_text('{"global_step": 2}'),
        "trainer_state.json: global_step is 2",
    ),
    "rank of another degree": (
        lambda d: shutil.copy(d / FIRST, d / FIRST.with_name("dp_rank_00_tp_rank_02_pp_rank_00.pt")),
        "tp_rank_02_pp_rank_00.pt: does not belong",
    ),
    "expert parallel": (
        lambda d: shutil.copy(d / FIRST, d / FIRST.with_name("dp_rank_00_ep_rank_00_tp_rank_00_pp_rank_00.pt")),
        "expert or context parallelism",
    ),
    "degrees of a stage": (
        lambda d: change(d / METADATA, lambda v: specs_of(v)[0][1].update(tp_size=4)),
        "tensor parallel size: .* says 2, mp_metadata_pp_rank_0.json says 4",
    ),
    "no degree": (
        lambda d: change(d / METADATA, lambda v: specs_of(v)[0][1].update(tp_size=0)),
        r"mp_metadata_pp_rank_0\.json: tp_size",
    ),
    "degrees of stages": (
        lambda d: change(
            d / METADATA, lambda v: (all_partitions(v, 4), [spec[1].update(tp_size=4) for spec in specs_of(v)])
        ),
        "tensor parallel size: .*rank_1.json says 2, .*rank_0.json says 4",
    ),
    "unknown transformation": (
        lambda d: change(d / METADATA, lambda v: specs_of(v)[0].__setitem__(0, "NewSpec")),
        "NewSpec",
    ),
    "fused sizes": (
        lambda d: change(d / METADATA, lambda v: specs_of(v)[0][1].update(original_dims=[16, 4])),
        r"gate_up_proj.* has shape .* dimension 0 size 10",
    ),
    "fused along inputs": (
        lambda d: change(d / METADATA, lambda v: specs_of(v)[0][1].update(fuse_axis=1)),
        r"mp_metadata_pp_rank_0\.json: fuse_axis",
    ),
    "another PEFT method": (
        lambda d: change(d / METADATA, lambda v: specs_of(v)[0][1].update(peft_type="ia3")),
        r"mp_metadata_pp_rank_0\.json: peft_type",
    ),
    "undescribed tensor": (
        lambda d: change(
            d / METADATA, lambda v: v["parameters"].pop(next(name for name in v["parameters"] if "lora_B" in name))
        ),
        "no metadata describes .*lora_B.weight",
    ),
    "module without factors": (
        lambda d: change(
            d / METADATA,
            lambda v: v["parameters"].update(
                {"base_model.model.model.layers.0.x.lora_A.default.weight": {"tensor_model_parallel": False}}
            ),
        ),
        r"layers\.0\.x\.lora_A\.weight is missing",
    ),
    "rank in config": (
        lambda d: change(d / "adapter_default/adapter_config.json", lambda v: v.update(r=8)),
        "rank 8, its factors have rank 2",
    ),
    "DoRA": (lambda d: change(d / "adapter_default/adapter_config.json", lambda v: v.update(use_dora=True)), "DoRA"),
    "bare adapter": (lambda d: (d / "adapter_other").mkdir(), "adapter_other: adapter_shards is missing"),
    "both kinds": (lambda d: (d / "shards").mkdir(), "both adapters and a whole model"),
}


@pytest.mark.parametrize("case", XSER)
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, case: str) -> None:
    make_adapter(tmp_path)
    damage, message = XSER[case]
    damage(tmp_path / "checkpoint-4")
    with pytest.raises(UserError, match=message) as refusal:
        open_checkpoint(tmp_path / "checkpoint-4")
    assert "\n" not in str(refusal.value)


def drop_pair_half(state: dict[str, Tensor]) -> None:
    del state[next(name for name in state if name.endswith("lora_A.weight"))]


PLAIN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "names": (lambda d: resave(d / SECOND, rename_first), "is missing, dp_rank_00_tp_rank_0"),
    "dtype": (
        lambda d: resave(d / SECOND, lambda state: state.update({key: value.half() for key, value in state.items()})),
        r"is F16 .*, rank 0 has F32",
    ),
    "shape": (
        lambda d: resave(d / SECOND, lambda state: state.update({key: value[:1] for key, value in state.items()})),
        r"is F32 \[1, .*, rank 0 has F32",
    ),
    "no state dict": (lambda d: torch.save([1], d / FIRST), "does not hold a state dict"),
    "no tensor": (lambda d: resave(d / FIRST, lambda state: state.update(x=1)), "x is not a tensor"),
    "factor missing": (
        lambda d: [resave(d / file, drop_pair_half) for file in (FIRST, SECOND)],
        "lora_A.weight is missing",
    ),
    "stale xser folder": (lambda d: beside(d / FIRST, ".tensors").mkdir(), "refers to no tensor file"),
}


@pytest.mark.parametrize("case", PLAIN)
def test_a_damaged_checkpoint_of_plain_files_is_refused(tmp_path: Path, case: str) -> None:
    make_adapter(tmp_path, layout=Layout(2, xser=False))
    damage, message = PLAIN[case]
    damage(tmp_path / "checkpoint-4")
    with pytest.raises(UserError, match=message):
        open_checkpoint(tmp_path / "checkpoint-4")


def test_a_factor_without_its_partner_is_refused(tmp_path: Path) -> None:
    make_adapter(tmp_path, layout=Layout(2, xser=False))
    directory = tmp_path / "checkpoint-4"
    for file in (FIRST, SECOND):
        resave(directory / file, drop_pair_half)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
    change(directory / METADATA, lambda values: values["parameters"].pop(name))
    with pytest.raises(UserError, match=r"q_proj\.lora_B\.weight has no .*q_proj\.lora_A\.weight"):
        open_checkpoint(directory)


def test_heads_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    make_adapter(tmp_path, layout=Layout(4))
    change(
        tmp_path / "checkpoint-4" / METADATA,
        lambda values: [spec[1].update(num_key_value_heads=3) for spec in specs_of(values) if "GQA" in spec[0]],
    )
    with pytest.raises(UserError, match="4 query heads and 3 key heads x 2 do not divide"):
        open_checkpoint(tmp_path / "checkpoint-4")


def test_a_full_checkpoint_without_its_last_stage_is_refused(tmp_path: Path) -> None:
    make_model(tmp_path)
    shards = tmp_path / "checkpoint-4" / "shards"
    for path in [*shards.glob("model/*pp_rank_01.pt"), shards / "mp_metadata_pp_rank_1.json"]:
        path.unlink()
    with pytest.raises(UserError, match="pipeline_parallel_size is 2, the shards have 1"):
        open_checkpoint(tmp_path / "checkpoint-4")


def test_a_lora_checkpoint_without_its_last_stage_is_refused(tmp_path: Path) -> None:
    # the files of the first stage name the tensors of all
    make_adapter(tmp_path)
    shards = tmp_path / "checkpoint-4" / SHARDS
    for path in [*shards.glob("model/*pp_rank_01.pt"), shards / "mp_metadata_pp_rank_1.json"]:
        path.unlink()
    with pytest.raises(UserError, match=r"no metadata describes .*layers\.1\."):
        open_checkpoint(tmp_path / "checkpoint-4")


def test_what_is_no_checkpoint_is_refused_with_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"looked for shards/, adapter_\*/adapter_shards/ .* and \.metadata"):
        open_checkpoint(tmp_path)
    with pytest.raises(UserError, match="no such directory"):
        open_checkpoint(tmp_path / "gone")


class _Hostile:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


@pytest.mark.parametrize("place", [FIRST, beside(FIRST, ".info.pt"), beside(FIRST, ".tensors") / "tensor_0.pt"])
def test_a_hostile_file_is_refused_and_not_run(tmp_path: Path, place: Path) -> None:
    make_adapter(tmp_path)
    witness = tmp_path / "witness"
    torch.save(_Hostile(f"touch {witness}"), tmp_path / "checkpoint-4" / place)
    with pytest.raises(UserError, match=r"refused: names posix\.system"):
        open_checkpoint(tmp_path / "checkpoint-4")
    assert not witness.exists()


def test_a_shared_tensor_that_differs_is_seen(tmp_path: Path) -> None:
    make_adapter(tmp_path, layout=Layout(2, xser=False))

    def drift(state: dict[str, Tensor]) -> None:
        next(tensor for name, tensor in state.items() if name.endswith("q_proj.lora_A.weight")).add_(1)

    resave(tmp_path / "checkpoint-4" / SECOND, drift)
    found = open_checkpoint(tmp_path / "checkpoint-4").adapters[0].tensors
    assert {tensor.name for tensor in found if different_copies(tensor)} == {
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    }


@pytest.mark.parametrize("part", ["weight_k", "weight_v"])
def test_a_repeated_key_head_that_differs_is_seen(tmp_path: Path, part: str) -> None:
    make_model(tmp_path, layout=Layout(4, xser=False))
    file = tmp_path / "checkpoint-4/shards/model/dp_rank_00_tp_rank_03_pp_rank_00.pt"
    name = f"model.layers.1.self_attn.qkv_proj.{part}"
    resave(file, lambda state: state[name].add_(1))
    found = open_checkpoint(tmp_path / "checkpoint-4").model
    projection = f"model.layers.1.self_attn.{part[-1]}_proj.weight"
    assert {tensor.name for tensor in found if different_copies(tensor)} == {projection}


@pytest.mark.parametrize(("stages", "copies"), [(1, 2), (2, 4), (3, 4)])
def test_tied_weights_are_one_tensor_whose_copies_are_known(tmp_path: Path, stages: int, copies: int) -> None:
    found = make_model(tmp_path, Model(tied=True, layers=3), Layout(2, stages))
    (embedding,) = (tensor for tensor in found.model if "embed_tokens" in tensor.name or "lm_head" in tensor.name)
    assert (embedding.name, len(embedding.pieces)) == ("model.embed_tokens.weight", 2)
    assert len(embedding.replicas) == copies and not different_copies(embedding)
