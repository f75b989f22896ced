"""Compiled layers: one graph for all of a shape, no break in it, and nothing compiled again."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from hyperpod_ft.config.sections.training import Lora, Training
from hyperpod_ft.engines.batches import Batch
from hyperpod_ft.engines.torch import devices
from hyperpod_ft.engines.torch.lora import adapters
from hyperpod_ft.engines.torch.model import activations, attention, language_model, tensor_parallel
from hyperpod_ft.engines.torch.model.expert_load import ExpertCounts
from hyperpod_ft.planning.families import family_of
from tests.unit.tiny_families import MIXTURES, SIZES

CPU = torch.device("cpu")
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_NEURONX_NEFF_CACHE_DIR")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in CACHES:
        monkeypatch.setenv(name, str(tmp_path / "restored"))
    torch._dynamo.reset()
    counters.clear()


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend that only traces: the same graphs, without a compiler's minutes."""
    compile_with = torch.compile

    def trace(function: Any, *, backend: str, dynamic: bool, fullgraph: bool) -> Any:
        assert backend == "inductor"
        return compile_with(function, backend="aot_eager", dynamic=dynamic, fullgraph=fullgraph)

    monkeypatch.setattr(torch, "compile", trace)


def losses(
    root: Path,
    compiled: bool,
    mode: str = "none",
    offload: bool = False,
    lora: bool = False,
    by_bounds: bool = False,
    steps: int = 3,
) -> list[float]:
    """Of some steps in fp32, each with other tokens and other documents."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        attn_implementation=attention.NAME,
    )
    model = AutoModelForCausalLM.from_config(config).train()
    language_model.return_loss(model)
    if lora:
        adapters.adapt(model, Lora(), seed=0)
    layers = list(model.model.layers)
    training = Training(activation_checkpointing=mode, compile=compiled)
    activations.checkpoint_layers(layers, training)
    devices.compile_layers(layers, training, CPU, root)
    if offload:
        activations.offload_layers(layers, CPU, 1)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    found = []
    for step in range(steps):
        ids = torch.randint(0, 128, (2, 32), generator=torch.Generator().manual_seed(step))
        batch = Batch(ids, ids, torch.arange(32).remainder(7 + 5 * step).expand(2, -1).clone())
        inputs = language_model.inputs(batch, CPU, compiled and not by_bounds)
        if by_bounds:
            devices.let_vary(inputs["attention_mask"], 3)
        loss = model(**inputs)
        loss.backward()
        found.append(loss.item() / ids.numel())
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize(("mode", "offload"), [("none", False), ("full", False), ("selective", True)])
def test_one_graph_for_all_layers_and_steps(tmp_path: Path, traced: None, mode: str, offload: bool, lora: bool) -> None:
    assert losses(tmp_path, True, mode, offload, lora) == pytest.approx(losses(tmp_path, False, lora=lora), abs=1e-5)
    # with LoRA, the first layer's input needs no gradient: a graph of its own
    assert counters["stats"]["unique_graphs"] == 1 + lora
    assert not counters["graph_break"]
    assert counters["aot_autograd"]["ok"] == counters["aot_autograd"]["total"] == 1 + lora


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_layers_that_count_the_tokens_of_their_experts_share_a_graph(tmp_path: Path, traced: None, mode: str) -> None:
    found = []
    for compiled in False, True:
        torch.manual_seed(0)
        sizes = SIZES | MIXTURES["qwen3_moe"] | {"num_hidden_layers": 3}
        config = AutoConfig.for_model("qwen3_moe", **sizes, attn_implementation=attention.NAME)
        model = AutoModelForCausalLM.from_config(config).train()
        model.set_experts_implementation("batched_mm")  # grouped products on CPUs break a graph by themselves
        language_model.return_loss(model)
        counts = ExpertCounts(model, CPU, whole_rows=True)
        training = Training(activation_checkpointing=mode, compile=compiled)
        activations.checkpoint_layers(list(model.model.layers), training)
        devices.compile_layers(list(model.model.layers), training, CPU, tmp_path)
        ids = torch.randint(0, 64, (3, 2, 16), generator=torch.Generator().manual_seed(0))
        for each in ids:
            batch = Batch(each, each, torch.arange(16).expand(2, -1).clone())
            model(**language_model.inputs(batch, CPU, compiled)).backward()
        found.append(counts.take())
    assert torch.equal(*found) and found[0].sum() == 2 * 3 * ids.numel()
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.parametrize(("mode", "offload"), [("none", False), ("full", False), ("selective", True)])
def test_attention_document_by_document_is_not_compiled_again(
    tmp_path: Path, traced: None, mode: str, offload: bool
) -> None:
    """As on CUDA where flash attention does not serve; each step has documents of other lengths.

    The compiler leaves a layer with recomputation alone when something in it is not compiled.
    """
    graphs = []
    for steps in (2, 6):
        torch._dynamo.reset()
        counters.clear()
        found = losses(tmp_path, True, mode, offload, by_bounds=True, steps=steps)
        graphs.append(counters["stats"]["unique_graphs"])
    assert found == pytest.approx(losses(tmp_path, False, steps=6), abs=1e-5)
    assert graphs[0] == graphs[1]
    assert (graphs[0] > 1) == (mode == "none")


@pytest.mark.training
def test_compiled_losses_are_those_without(tmp_path: Path) -> None:
    """With the compiler, which takes up to minutes on an empty cache; it writes below the root."""
    assert losses(tmp_path, True) == pytest.approx(losses(tmp_path, False), abs=1e-5)
    assert counters["stats"]["unique_graphs"] == 1
    assert list((devices.cache_directory(tmp_path, CPU) / "inductor").iterdir())


def test_a_dimension_may_vary() -> None:
    """As the number of documents, which attention on CUDA takes as a tensor."""

    def graphs(vary: bool) -> int:
        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(lambda x, bounds: x * bounds.sum(), backend="eager", dynamic=False)
        for size in (2, 4, 8):
            bounds = torch.ones(1, 1, 1, size)
            if vary:
                devices.let_vary(bounds, 3)
            compiled(torch.ones(2), bounds)
        return counters["stats"]["unique_graphs"]

    assert (graphs(True), graphs(False)) == (1, 3)


def test_by_default_only_accelerators_compile(tmp_path: Path) -> None:
    for wanted, device, compiled in [
        (None, "cpu", False),
        (None, "cuda", True),
        (False, "cuda", False),
        (True, "cpu", True),
    ]:
        layer = torch.nn.Linear(1, 1)
        devices.compile_layers([layer], Training(compile=wanted), torch.device(device), tmp_path)
        assert ("forward" in vars(layer)) == compiled


@pytest.mark.parametrize(
    ("family", "sequence_parallel", "lora", "graphs"),
    [
        ("llama", False, False, 1),
        ("llama", True, False, 1),
        # the first layer's input needs no gradient
        ("llama", True, True, 2),
        ("olmo2", True, False, 1),
    ],
)
def test_divided_layers_share_a_graph(family: str, sequence_parallel: bool, lora: bool, graphs: int) -> None:
    """Each graph takes time to compile, and torch makes a limited number (devices.GRAPHS) of a function."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        row = family_of(family)
        assert row is not None
        sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": 0}
        config = AutoConfig.for_model(family, **sizes, **heads, attn_implementation=attention.NAME)
        model = AutoModelForCausalLM.from_config(config).train()
        language_model.return_loss(model)
        if lora:
            adapters.adapt(model, Lora(r=4, alpha=8), 0)
        tensor_parallel.parallelize(model, row, mesh, sequence_parallel=sequence_parallel)
        for layer in model.get_submodule(row.layers):
            layer.forward = torch.compile(layer.forward, backend="eager", dynamic=False)  # type: ignore[method-assign]
        ids, positions = torch.randint(0, 64, (1, 32)), torch.arange(32)[None]
        bounds = attention.document_numbers(positions)
        model(input_ids=ids, position_ids=positions, attention_mask=bounds, targets=ids.flatten()).backward()
        assert counters["stats"]["unique_graphs"] == graphs
    finally:
        dist.destroy_process_group()
