"""Base models loaded by slices: bit for bit what transformers loads, in every layout, or one line that says why not."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3MoeConfig,
)

from hyperpod_ft.checkpoint.formats.located import locate
from hyperpod_ft.engines.torch import devices
from hyperpod_ft.engines.torch.build import decoder_layers
from hyperpod_ft.engines.torch.loading import skeleton
from hyperpod_ft.engines.torch.model import tensor_parallel
from hyperpod_ft.engines.torch.sharding.shards import RankShard, TensorSplit, local, shards_of
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.families import family_of
from tests.unit import tiny_checkpoints

# an odd vocabulary, so that shards are uneven
SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
HEADS = {"head_dim": 8}
EXPERTS = {"num_experts_per_tok": 2}
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES),
    "gemma2": Gemma2Config(**SIZES | HEADS),
    "gemma3": Gemma3TextConfig(**SIZES | HEADS, layer_types=["sliding_attention", "full_attention"]),
    "gpt_neox": GPTNeoXConfig(**SIZES),
    "gpt2": GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "phi3": Phi3Config(**SIZES),
    "mixtral": MixtralConfig(**SIZES, **EXPERTS, num_local_experts=4),
    "qwen3_moe": Qwen3MoeConfig(**SIZES | HEADS, **EXPERTS, num_experts=4, moe_intermediate_size=16),
}
# data parallel, tensor parallel; what a rank reads does not depend on the type that it becomes
LAYOUTS = [
    *(((1, 1), torch.float32), ((1, 1), torch.bfloat16), ((2, 1), torch.bfloat16)),
    *(((1, 2), torch.float32), ((2, 2), torch.bfloat16), ((3, 4), torch.float32)),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for name, config in FAMILIES.items():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            # biases and norms are not drawn
            parameter.data.normal_(std=0.02)
        model.save_pretrained(root / name, max_shard_size="50KB")
    return {name: root / name for name in FAMILIES}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_checkpoints.base_model(tmp_path / "model@1")


@contextmanager
def rank_of(rank: int, world_size: int) -> Iterator[None]:
    """This process as one of several, which need not exist: sharding communicates nothing."""
    # it remembers meshes of other ranks, which a process otherwise never sees
    _clear_sharding_prop_cache()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def load(directory: Path, dtype: torch.dtype = torch.float32, data_parallel: int = 1, tensor_parallel_degree: int = 1):
    """What engines/torch/build.py does, without adapters."""
    model = skeleton.build(directory, dtype, "eager")
    assert all(parameter.is_meta for parameter in model.parameters())
    weights = locate(model, directory)
    shards: dict[str, RankShard] = {}
    if data_parallel * tensor_parallel_degree > 1:
        mesh = init_device_mesh("cpu", (data_parallel, tensor_parallel_degree), mesh_dim_names=("dp_shard", "tp"))
        splits: dict[str, TensorSplit] = {}
        if tensor_parallel_degree > 1:
            family = family_of(model.config.model_type)
            assert family is not None
            splits = tensor_parallel.parallelize(model, family, mesh["tp"], sequence_parallel=True)
        shards = shards_of(dict(model.named_parameters()), mesh, splits)
        if data_parallel > 1:
            for layer in decoder_layers(model):
                fully_shard(layer, mesh=mesh["dp_shard"])
            fully_shard(model, mesh=mesh["dp_shard"])
    skeleton.materialize(model, torch.device("cpu"))
    skeleton.fill(model, weights, shards)
    return model


def by_transformers(directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager")


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    flat = tensor.detach().contiguous().view(-1)
    return tensor.dtype, tensor.shape, flat.view(torch.uint8).numpy().tobytes()


def shard_of(name: str, whole: torch.Tensor, layout: tuple[int, int], rank: int) -> torch.Tensor:
    """A rank's shard, by Megatron's rule for tp and FSDP's for dp, written without the engine."""
    data_parallel, ranks = layout
    dp_rank, tp_rank = divmod(rank, ranks)
    *_, module, kind = name.split(".")
    if ranks > 1:
        if module in ("embed_tokens", "lm_head", "wte", "embed_in"):
            whole = whole.tensor_split(ranks)[tp_rank]
        elif module in ("k_proj", "v_proj"):  # as many copies of the two heads as there are ranks for each
            heads = whole.chunk(2)
            whole = torch.cat([head for head in heads for _ in range(max(1, ranks // 2))]).chunk(ranks)[tp_rank]
        elif module in ("q_proj", "gate_proj", "up_proj", "query_key_value", "dense_h_to_4h"):
            whole = whole.chunk(ranks)[tp_rank]
        elif module == "c_fc":
            whole = whole.chunk(ranks, dim=-1)[tp_rank]
        elif module in ("qkv_proj", "gate_up_proj", "c_attn"):
            dim, sizes = {"qkv_proj": (0, [32, 16, 16]), "gate_up_proj": (0, [48, 48]), "c_attn": (-1, [32] * 3)}[
                module
            ]
            whole = torch.cat([part.chunk(ranks, dim)[tp_rank] for part in whole.split(sizes, dim)], dim)
        elif module in ("o_proj", "down_proj", "dense", "dense_4h_to_h") and kind == "weight":
            whole = whole.chunk(ranks, dim=1)[tp_rank]
        elif module == "c_proj" and kind == "weight":
            whole = whole.chunk(ranks)[tp_rank]
    shards = whole.chunk(data_parallel)
    return shards[dp_rank] if dp_rank < len(shards) else whole[:0]


def test_a_device_with_fixed_shapes_gets_whole_tensors(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is copied there once, from host memory."""
    monkeypatch.setattr(devices, "fixed_shapes", lambda device: True)
    for family in ("llama-tied", "mixtral"):
        check(models[family], (1, 1), torch.bfloat16)
    check(models["llama"], (2, 2), torch.float32)


def check(directory: Path, layout: tuple[int, int], dtype: torch.dtype) -> None:
    expected = by_transformers(directory, dtype)
    for rank in range(layout[0] * layout[1]):
        with rank_of(rank, layout[0] * layout[1]):
            loaded = load(directory, dtype, *layout)
            found = {name: local(p.detach()) for name, p in loaded.named_parameters()}
            wanted = {name: shard_of(name, p.detach(), layout, rank) for name, p in expected.named_parameters()}
            assert found.keys() == wanted.keys()
            for name, shard in found.items():
                assert bits(shard) == bits(wanted[name]), f"{directory.name}, rank {rank}: {name}"
            buffers = {name: bits(buffer) for name, buffer in loaded.named_buffers()}
            assert buffers == {name: bits(buffer) for name, buffer in expected.named_buffers()}


@pytest.mark.parametrize(("layout", "dtype"), LAYOUTS, ids=str)
def test_every_layout_holds_transformers_bits(
    models: dict[str, Path], layout: tuple[int, int], dtype: torch.dtype
) -> None:
    for name, config in FAMILIES.items():
        # a fused linear holds no copies of its two key/value heads
        if layout[1] == 1 or (family_of(config.model_type) and (name, layout[1]) != ("phi3", 4)):
            check(models[name], layout, dtype)


def test_a_rank_may_hold_nothing_of_a_tensor(models: dict[str, Path]) -> None:
    """Four experts on five ranks."""
    check(models["qwen3_moe"], (5, 1), torch.float32)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rotary_frequencies_of_every_kind_are_transformers(tmp_path: Path, rope: dict[str, Any]) -> None:
    config = LlamaConfig(**SIZES, rope_parameters={"rope_theta": 500000.0, **rope})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    expected, loaded = by_transformers(tmp_path, torch.bfloat16), load(tmp_path, torch.bfloat16)
    assert bits(loaded.model.rotary_emb.inv_freq) == bits(expected.model.rotary_emb.inv_freq)
    ids = torch.arange(3, 40)[None]
    assert torch.equal(loaded.eval()(ids).logits, expected(ids).logits)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float64])
def test_any_floating_dtype_on_disk(tmp_path: Path, stored: torch.dtype) -> None:
    directory = tiny_checkpoints.base_model(tmp_path / "model", stored, max_shard_size="20KB")
    for dtype in (torch.float32, torch.bfloat16):
        expected = by_transformers(directory, dtype).state_dict()
        assert {k: bits(v) for k, v in load(directory, dtype).state_dict().items()} == {
            k: bits(v) for k, v in expected.items()
        }


def test_names_without_the_base_models_prefix(tmp_path: Path) -> None:
    directory = tiny_checkpoints.base_model(tmp_path / "tied", tied=True)
    before = bits(by_transformers(directory, torch.float32).model.norm.weight)
    change_tensors(directory, lambda tensors: {name.removeprefix("model."): t for name, t in tensors.items()})
    assert bits(load(directory).model.norm.weight) == before


def test_tied_weights_are_one_tensor(tmp_path: Path) -> None:
    directory = tiny_checkpoints.base_model(tmp_path / "tied", tied=True)
    loaded = load(directory)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    # under the other name alone, then under both
    change_tensors(directory, lambda tensors: {head if k == embedding else k: t for k, t in tensors.items()})
    assert bits(load(directory).model.embed_tokens.weight) == bits(loaded.lm_head.weight)
    change_tensors(directory, lambda tensors: tensors | {embedding: tensors[head].clone()})
    assert bits(load(directory).model.embed_tokens.weight) == bits(loaded.lm_head.weight)
    change_tensors(directory, lambda tensors: tensors | {embedding: tensors[head] + 1})
    with pytest.raises(UserError, match="is stored twice, with different values"):
        load(directory)


def change_tensors(directory: Path, change: Any) -> None:
    file = directory / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def change_config(model: Path, **values: Any) -> None:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def refuse(model: Path, match: str) -> None:
    with pytest.raises(UserError, match=match) as refused:
        load(model)
    assert "\n" not in str(refused.value)


def test_a_missing_tensor_is_named(model: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    change_tensors(model, lambda tensors: {key: value for key, value in tensors.items() if key != name})
    refuse(model, rf"1 of the model's tensors are missing: {name}")


def test_a_missing_expert_is_named(models: dict[str, Path], tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(FAMILIES["mixtral"]).save_pretrained(tmp_path)
    lost = ".0.block_sparse_moe.experts.3.w1.weight"
    change_tensors(tmp_path, lambda tensors: {key: value for key, value in tensors.items() if not key.endswith(lost)})
    refuse(tmp_path, r"layers\.0\.mlp\.experts\.gate_up_proj")


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"hidden_size": 64}, r"has shape \[400, 32\], but config\.json requires \[400, 64\]"),
        ({"num_hidden_layers": 3}, r"are missing: model\.layers\.2\."),
        ({"num_hidden_layers": None}, "cannot load the model: "),
        ({"num_attention_heads": 0}, "cannot load the model: "),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"quantized \(gptq\) and cannot be decoded"),
    ],
)
def test_a_config_that_does_not_fit_the_weights_is_one_line(model: Path, values: dict[str, Any], match: str) -> None:
    change_config(model, **values)
    refuse(model, match)


def test_damaged_weights_are_one_line(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-500])
    refuse(model, r"model\.safetensors: is truncated")


def test_8_bit_floats_are_refused(model: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    change_tensors(model, lambda tensors: tensors | {name: tensors[name].to(torch.float8_e4m3fn)})
    refuse(model, f"tensor {name} has dtype F8_E4M3, which cannot be fine-tuned")


def test_a_pickle_is_not_loaded(model: Path) -> None:
    torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    refuse(model, r"has neither model\.safetensors nor model\.safetensors\.index\.json")


def test_the_models_own_code_is_not_run(model: Path) -> None:
    (model / "evil.py").write_text("raise SystemExit('the model ran')")
    change_config(
        model, model_type="evil", auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    )
    refuse(model, "trust_remote_code")


def test_a_conversion_without_byte_ranges_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.core_model_loading import Interleave, WeightConverter

    from hyperpod_ft.checkpoint.formats import located

    interleaved = WeightConverter("mlp.up_proj.weight", "mlp.up_proj.weight", [Interleave(dim=0)])
    monkeypatch.setattr(located, "get_model_conversion_mapping", lambda _: [interleaved])
    refuse(model, r"cannot load llama: its tensor model\.layers\.0\.mlp\.up_proj\.weight needs Interleave")


def test_what_a_class_keeps_in_fp32_stays_in_fp32(model: Path) -> None:
    built = skeleton.build(model, torch.bfloat16, "eager")
    built._keep_in_fp32_modules_strict = {"norm"}
    skeleton._keep_in_fp32(built, torch.bfloat16)
    assert {parameter.dtype for parameter in built.parameters()} == {torch.float32, torch.bfloat16}
    assert all(("norm" in name) == (p.dtype == torch.float32) for name, p in built.named_parameters())
