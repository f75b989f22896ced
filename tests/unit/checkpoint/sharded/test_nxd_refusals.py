"""Checkpoints of optimum-neuron that must be refused, and copies of a tensor that differ."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hyperpod_ft.checkpoint.sharded.sharded import open_checkpoint
from hyperpod_ft.errors import UserError
from tests.unit.checkpoint.sharded.nxd_checkpoints import make_adapter, make_model
from tests.unit.nxd_models import Layout
from tests.unit.tensor_values import different_copies

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
