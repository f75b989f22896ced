"""The same checks of engine torch on the CPU and on one CUDA device, where attention, streams and copies differ.

    pytest -m gpu

runs those for CUDA.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode
from transformers import AutoConfig, AutoModelForCausalLM

from hyperpod_ft.data.packing import IGNORED
from hyperpod_ft.engines.interface import TrainingProgress
from hyperpod_ft.engines.ranks import Ranks
from hyperpod_ft.engines.torch import devices
from hyperpod_ft.engines.torch.loop import TrainingLoop
from hyperpod_ft.engines.torch.lora.product import product
from hyperpod_ft.engines.torch.mesh import device_meshes
from hyperpod_ft.engines.torch.model import activations, attention
from hyperpod_ft.engines.torch.model.loss import LogitsRule, summed_cross_entropy
from hyperpod_ft.engines.torch.model.t5 import attention as t5_attention
from hyperpod_ft.engines.torch.steps import Step
from hyperpod_ft.planning.layout import Sharding
from hyperpod_ft.planning.torch.memory import loss_block
from hyperpod_ft.runs.run import Run
from tests.tasks import task_of
from tests.training.conftest import VOCABULARY, MakeRun, process_group_of_its_own, tiny_llama
from tests.unit import tiny_t5
from tests.unit.tiny_families import MIXTURES, SIZES

NO_CUDA = "torch.cuda.is_available() is false: torch finds no CUDA device, or was built without CUDA"
CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_CUDA)])
STEPS, SAVED = 4, 2
WHOLE = Sharding("replicated", 1)
EAGER = {"training.compile": False}
FULL = {"training.method": "full"}
T5 = {
    "dataset.format": "prompt-completion",
    "dataset.max_target_length": 16,
    "lora": {"r": 4, "alpha": 8, "target_modules": ["q", "k", "v", "o", "wi_0", "wi_1", "wo"]},
}
EXPERTS = {"lora": {"r": 4, "alpha": 8, "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}}
# settings, and the type of the model with its own ones
TRAININGS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "lora": (EAGER, "llama", {}),
    "dora": (EAGER | {"lora.dora": True}, "llama", {}),
    "nf4": (EAGER | {"lora.quantization": "nf4"}, "llama", {}),
    "full": (EAGER | FULL, "llama", {}),
    "8-bit moments": (EAGER | FULL | {"training.optimizer_state": "int8"}, "llama", {}),
    "recomputed": (EAGER | {"training.activation_checkpointing": "selective"}, "llama", {}),
    "GPT-J": (EAGER, "gptj", {"rotary_dim": 4}),
    "GPT-2": (EAGER | FULL, "gpt2", {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}),
    "sliding window": (EAGER, "mistral", {"sliding_window": 8}),
    "softcap": (EAGER, "gemma2", {"sliding_window": 8}),
    "Flan-T5": (EAGER | T5, "t5", {}),
    "mixture": (EAGER | FULL, "qwen3_moe", MIXTURES["qwen3_moe"]),
    "adapters of experts": (EAGER | EXPERTS, "mixtral", MIXTURES["mixtral"]),
    "mixture with sinks": (EAGER | EXPERTS | {"dataset.packing": "none"}, "gpt_oss", MIXTURES["gpt_oss"]),
    "compiled mixture": (FULL, "qwen3_moe", MIXTURES["qwen3_moe"]),
    "compiled": (FULL, "qwen3", {}),
    "compiled, recomputed": ({"training.activation_checkpointing": "selective"}, "qwen3", {}),
    "compiled softcap": ({}, "gemma2", {"sliding_window": 8}),
    "compiled Flan-T5": (T5, "t5", {}),
}
# of values that are about 1: another order of summation
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    deterministic = torch.are_deterministic_algorithms_enabled()
    # as `device_of` sets it: on CUDA some kernels have no deterministic version
    torch.use_deterministic_algorithms(request.param == "cpu")
    yield torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")
    torch.use_deterministic_algorithms(deterministic)


def random(*shape: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The same numbers on every device."""
    return torch.randn(*shape).to(device, dtype).requires_grad_()


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    limit = CLOSE[found.dtype] * expected.abs().max().item()
    torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=limit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_documents_attend_as_they_do_alone(device: torch.device, dtype: torch.dtype) -> None:
    """In bf16 on CUDA, flash attention for documents of different lengths (varlen) keeps them apart."""
    torch.manual_seed(0)
    lengths = (9, 40, 1, 14)
    ids = torch.cat([torch.arange(length) for length in lengths])[None].to(device)
    inputs = [random(1, heads, sum(lengths), 16, device=device, dtype=dtype) for heads in (4, 2, 2)]
    packed, _ = attention.attend(torch.nn.Module(), *inputs, attention.document_bounds(ids))
    documents = zip(*(tensor.split(lengths, dim=2) for tensor in inputs), strict=True)
    alone = torch.cat(
        [scaled_dot_product_attention(*document, is_causal=True, enable_gqa=True) for document in documents], dim=2
    ).transpose(1, 2)
    assert_near(packed, alone)
    weights = torch.randn(alone.shape).to(device, dtype)
    of_packed, of_alone = (torch.autograd.grad((output * weights).sum(), inputs) for output in (packed, alone))
    for one, other in zip(of_packed, of_alone, strict=True):
        assert_near(one, other)


@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=CUDA.marks)])
def test_the_loss_in_blocks_is_that_of_whole_logits(device: torch.device, fused: bool) -> None:
    if fused and device.type == "cpu":
        pytest.skip("only a GPU's loss is compiled")
    torch.manual_seed(0)
    head = torch.nn.Linear(16, 50, bias=False).to(device)
    hidden = random(2 * loss_block(fused=fused) + 7, 16, device=device, dtype=torch.float32)
    targets = torch.randint(0, 50, (len(hidden),)).to(device)
    targets[::4] = IGNORED
    blocks = summed_cross_entropy(hidden, head, targets, LogitsRule(fused=fused))
    whole = cross_entropy(head(hidden), targets, ignore_index=IGNORED, reduction="sum")
    assert_near(blocks, whole)
    wanted = [hidden, head.weight]
    for one, other in zip(torch.autograd.grad(blocks, wanted), torch.autograd.grad(whole, wanted), strict=True):
        assert_near(one, other)


def test_the_product_of_a_lora_layer_is_the_formula(device: torch.device) -> None:
    torch.manual_seed(0)
    x, a, b = (random(*shape, device=device, dtype=torch.float32) for shape in ((3, 5, 16), (4, 16), (12, 4)))
    weight = torch.randn(12, 16).to(device)
    found, expected = product(x, None, weight, None, None, a, b, 0.5), x @ (weight + 0.5 * b @ a).T
    assert_near(found, expected)
    weights = torch.randn(expected.shape).to(device)
    of_found, of_expected = (torch.autograd.grad((output * weights).sum(), (x, a, b)) for output in (found, expected))
    for one, other in zip(of_found, of_expected, strict=True):
        assert_near(one, other)


def test_activations_in_host_memory_change_no_bit(device: torch.device) -> None:
    ids = torch.arange(64, device=device).view(2, 32)

    def gradients(offload: bool) -> dict[str, Any]:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(tiny_llama()).to(device)
        model.model.embed_tokens.requires_grad_(False)  # its gradient on CUDA is summed in no fixed order
        if offload:
            activations.offload_layers(list(model.model.layers), device, at_least=1)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}

    expected = gradients(offload=False)
    for name, gradient in gradients(offload=True).items():
        assert torch.equal(gradient, expected[name]), name


@contextmanager
def training(run: Run, device: torch.device, sharding: Sharding) -> Iterator[TrainingLoop]:
    """The training loop of one rank, in a process group of its own."""
    ranks = Ranks(0, 1, 0, torch.distributed.HashStore())
    with process_group_of_its_own(), device_meshes(device, ranks, run.plan.degrees) as meshes:
        yield TrainingLoop(task_of(run, sharding), ranks, device, meshes)


def losses(run: Run, device: torch.device, sharding: Sharding = WHOLE) -> list[float]:
    with training(run, device, sharding) as loop:
        return [loop.step(step, []).loss for step in range(1, STEPS + 1)]


@pytest.mark.training
@pytest.mark.parametrize(("mode", "offload"), [("replicated", "optimizer"), ("zero3", "parameters")])
def test_state_in_host_memory_changes_no_loss(make_run: MakeRun, device: torch.device, mode: Any, offload: Any) -> None:
    run = make_run("offload", {"training.method": "full", "training.compile": False})
    expected = losses(run, device)
    # within one mode on a CPU, no bit changes (test_sharding.py); on CUDA, AdamW runs on another processor
    limit = 1e-6 if device.type == "cpu" else 1e-4
    threads = torch.get_num_threads()
    try:
        assert losses(run, device, Sharding(mode, 1, offload)) == pytest.approx(expected, rel=0, abs=limit)
        assert device.type == "cpu" or torch.get_num_threads() == devices.host_threads(1)
    finally:
        torch.set_num_threads(threads)
    assert expected[-1] < expected[0]


@pytest.mark.training
@pytest.mark.parametrize("async_save", [False, True])
def test_a_restart_changes_no_bit(make_run: MakeRun, device: torch.device, async_save: bool) -> None:
    run = make_run("restart", {"training.compile": False, "training.async_save": async_save})
    with training(run, device, WHOLE) as loop:
        for step in range(1, SAVED + 1):
            loop.step(step, [])
        loop.state.save(TrainingProgress(step=SAVED), last=False, wanted=True)
        straight = [loop.step(step, []).loss for step in range(SAVED + 1, STEPS + 1)]
        loop.state.finish()
    with training(run, device, WHOLE) as loop:
        assert loop.state.resume(loop.total_steps).step == SAVED
        assert [loop.step(step, []).loss for step in range(SAVED + 1, STEPS + 1)] == straight


def run_of(make_run: MakeRun, kind: str, **settings: Any) -> Run:
    own, family, changes = TRAININGS[kind]
    sizes = SIZES | {"vocab_size": VOCABULARY}
    model = tiny_t5.config() if family == "t5" else AutoConfig.for_model(family, **sizes | changes)
    return make_run("gpu", own | settings, model=model)


@pytest.mark.training
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", TRAININGS)
@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_a_gpu_gives_the_losses_of_a_cpu(make_run: MakeRun, device: torch.device, kind: str, precision: str) -> None:
    run = run_of(make_run, kind, **{"training.precision": precision})
    steps: dict[str, list[Step]] = {}
    for each in (torch.device("cpu"), device):
        with training(run, each, WHOLE) as loop:
            steps[each.type] = [loop.step(step, []) for step in range(1, STEPS + 1)]
    expected = steps["cpu"]
    limit, limit_of_norm = (1e-4, 1e-3) if precision == "fp32" else (1e-2, 5e-2)
    assert [step.loss for step in steps[device.type]] == pytest.approx([step.loss for step in expected], rel=limit)
    norms = [step.grad_norm for step in expected]
    assert [step.grad_norm for step in steps[device.type]] == pytest.approx(norms, rel=limit_of_norm)


class Asking(TorchDispatchMode):
    """Refuses what waits for a device: values that decide the shape of a result, or what the program does next."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        depends = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & {*func.tags}
        if func is torch.ops.aten.index.Tensor:  # only where it selects
            depends = any(index is not None and index.dtype == torch.bool for index in args[1])
        if depends:
            raise AssertionError(f"{func} asks for a value")
        return func(*args, **kwargs or {})


def on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        with _disable_current_modes():
            return function(*args)

    return call


def listed(tensor: torch.Tensor, values: Callable[[torch.Tensor], Any] = torch.Tensor.tolist) -> Any:
    """`tolist`, which `Asking` does not see on a CPU."""
    assert _get_current_dispatch_mode() is None, "a list is asked for"
    return values(tensor)


@pytest.mark.training
@pytest.mark.parametrize("kind", [kind for kind in TRAININGS if "compiled" not in kind])
def test_no_step_asks_for_a_value(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The same without a GPU, but for copies; also where each document is attended to on its own, as soft caps need."""
    run = run_of(make_run, kind)
    for owner, name in ((TrainingLoop, "inputs"), (t5_attention, "_lengths")):  # of T5, only the CPU asks
        monkeypatch.setattr(owner, name, on_host(getattr(owner, name)))
    monkeypatch.setattr(torch.Tensor, "tolist", listed)
    with training(run, torch.device("cpu"), WHOLE) as loop:
        with Asking():
            launched = loop.launch(1, [])
        assert launched.read(loop.metrics).number == 1


@pytest.mark.training
@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_no_step_waits_for_the_device(make_run: MakeRun, device: torch.device, method: str) -> None:
    """Torch itself says when the program waits, but for copies of NCCL."""
    run = make_run("waits", {"training.method": method, "training.precision": "bf16", "training.max_steps": 6})
    with training(run, device, WHOLE) as loop:
        for step in (1, 2):
            loop.step(step, [])  # compiles
        torch.cuda.set_sync_debug_mode("error")
        try:
            launched = [loop.launch(step, []) for step in (3, 4)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert [step.read(()).number for step in launched] == [3, 4]


@pytest.mark.training
@pytest.mark.parametrize("device", [CUDA], indirect=True)  # for the CPU, which takes long to compile: test_compiled.py
def test_compiled_layers_change_no_loss(make_run: MakeRun, device: torch.device) -> None:
    expected, found = (
        losses(make_run(f"compile-{compiled}", {"training.compile": compiled}), device) for compiled in (False, True)
    )
    assert found == pytest.approx(expected, rel=0, abs=1e-4)
