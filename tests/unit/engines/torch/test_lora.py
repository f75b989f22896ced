"""The engine's LoRA computes what PEFT computes, keeps little for the backward pass, and gives PEFT its adapter."""

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from hyperpod_ft.config.sections.training import Lora, Training
from hyperpod_ft.engines.torch.lora import product as lora_product
from hyperpod_ft.engines.torch.lora.adapters import (
    LoraLinear,
    adapt,
    initial_magnitude,
    initial_value,
    learning_rate_factor,
)
from hyperpod_ft.engines.torch.lora.product import product
from hyperpod_ft.engines.torch.model import activations
from hyperpod_ft.errors import UserError

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
IDS = torch.arange(24).reshape(2, 12).remainder(40)


def llama(**options: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, **options))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    return model


def gpt2(**options: Any) -> GPT2LMHeadModel:
    """Its linears are transposed, and attention's last one is square; without dropout."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "initializer_range": 0.1}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    return model


def peft_config(lora: Lora, transposed: bool) -> LoraConfig:
    return LoraConfig(
        fan_in_fan_out=transposed,
        r=lora.r,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        target_modules=list(lora.target_modules or ()),
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        task_type="CAUSAL_LM",
    )


def both(
    lora: Lora, dtype: torch.dtype = torch.float64, base: Any = llama, **options: Any
) -> tuple[nn.Module, PeftModel]:
    """The engine's model and PEFT's, with equal random factors."""
    ours, theirs = base(**options), get_peft_model(base(**options), peft_config(lora, base is gpt2))
    adapt(ours, lora, seed=3)
    torch.manual_seed(1)
    values = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        if parameter.requires_grad:
            change = 1 + 0.1 * torch.randn_like(parameter) if "magnitude" in name else torch.randn_like(parameter)
            parameter.data = parameter * change if "magnitude" in name else 0.2 * change
            values[live_name(name)].data.copy_(parameter)
    return ours.to(dtype).train(), theirs.to(dtype).train()


def live_name(name: str) -> str:
    """A factor's name in PEFT's live model."""
    name = "base_model.model." + name
    for last in (".lora_A", ".lora_B", ".lora_embedding_A", ".lora_embedding_B"):
        name = name.replace(f"{last}.weight", f"{last}.default.weight")
        name = f"{name}.default" if name.endswith(last) else name
    return name.replace(".lora_magnitude_vector", ".lora_magnitude_vector.default.weight")


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    labels = IDS.roll(-1, 1)
    logits = model(input_ids=IDS, use_cache=False).logits
    nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **found}


VARIANTS: dict[str, tuple[Lora, dict[str, Any]]] = {
    "lora": (Lora(r=3, alpha=6, target_modules=LINEARS), {}),
    "biases": (Lora(r=3, target_modules=LINEARS), {"attention_bias": True, "mlp_bias": True}),
    "rslora": (Lora(r=3, rslora=True, target_modules=LINEARS), {}),
    "transposed": (Lora(r=3, alpha=6, target_modules=("c_attn", "c_proj", "c_fc")), {"base": gpt2}),
    "dora of transposed": (Lora(r=3, dora=True, target_modules=("attn.c_proj", "c_fc")), {"base": gpt2}),
    "few": (Lora(r=2, target_modules=("0.self_attn.q_proj", "down_proj")), {}),
    "embedding and head": (Lora(r=2, target_modules=("embed_tokens", "q_proj", "lm_head")), {}),
    "tied": (Lora(r=2, target_modules=("lm_head", "v_proj")), {"tie_word_embeddings": True}),
    "dora": (Lora(r=3, dora=True, target_modules=LINEARS), {"attention_bias": True}),
    "dora of embedding and head": (Lora(r=2, dora=True, target_modules=("embed_tokens", "q_proj", "lm_head")), {}),
}

KINDS = {"lora": Lora(r=3), "dora": Lora(r=3, dora=True), "nf4": Lora(r=3, quantization="nf4")}


@pytest.mark.parametrize(("lora", "options"), VARIANTS.values(), ids=VARIANTS)
def test_logits_and_gradients_are_those_of_peft(lora: Lora, options: dict[str, Any]) -> None:
    ours, theirs = both(lora, **options)
    found, expected = gradients(ours), gradients(theirs)
    assert len(found) > 1 and {live_name(name) for name in found} - {live_name("logits")} == expected.keys() - {
        "logits"
    }
    for name, value in found.items():
        reference = expected["logits" if name == "logits" else live_name(name)]
        torch.testing.assert_close(
            value, reference, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("dora", [False, True])
def test_dropout_is_on_the_adapters_input_only(dora: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    mask = torch.rand(12, generator=torch.Generator().manual_seed(2)).gt(0.4)[None, :, None]
    monkeypatch.setattr(
        nn.functional, "dropout", lambda x, p=0.5, training=True, inplace=False: x * mask / (1 - p) if p else x
    )
    ours, theirs = both(Lora(r=3, dropout=0.4, dora=dora, target_modules=LINEARS), attention_bias=True)
    found, expected = gradients(ours), gradients(theirs)
    for name, value in found.items():
        torch.testing.assert_close(value, expected["logits" if name == "logits" else live_name(name)])
    assert not torch.equal(ours.eval()(IDS).logits, found["logits"]), "dropout is off"


def test_the_loss_of_a_new_adapter_is_the_base_models() -> None:
    for lora in (Lora(), Lora(dora=True), Lora(dora=True, target_modules=("embed_tokens", "q_proj"))):
        base, adapted = llama(), llama()
        adapt(adapted, lora, seed=0)
        assert torch.equal(base(IDS).logits, adapted(IDS).logits) or lora.dora
        torch.testing.assert_close(base(IDS).logits, adapted(IDS).logits)


def test_gradients_by_finite_differences() -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 3, 5, dtype=torch.float64), torch.randn(4, 5).double(), torch.randn(4).double()
    a, b = torch.randn(2, 5).double().requires_grad_(), torch.randn(4, 2).double().requires_grad_()
    inputs = (x.requires_grad_(), (x.detach() * 1.5).requires_grad_())
    assert torch.autograd.gradcheck(lambda x, a, b: product(x, None, weight, None, bias, a, b, 0.7), (inputs[0], a, b))
    assert torch.autograd.gradcheck(lambda x, d, a, b: product(x, d, weight, None, None, a, b, 0.7), (*inputs, a, b))


def test_base_names_are_those_of_the_models_files() -> None:
    model = llama()
    names = set(model.state_dict())
    adapt(model, Lora(target_modules=("q_proj", "embed_tokens")), seed=0)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == names and {".lora_" in name for name in model.state_dict().keys() - names} == {True}


def test_initial_values_depend_on_seed_and_name_alone() -> None:
    """The kaiming_uniform of PEFT for A, zeros for B; embeddings the other way round."""
    one, other = llama(), llama()
    adapt(one, Lora(r=4), seed=1)
    torch.manual_seed(99)
    adapt(other, Lora(r=4, target_modules=("v_proj", "q_proj")), seed=1)
    value = one.model.layers[1].self_attn.q_proj.lora_A.weight
    assert torch.equal(value, other.model.layers[1].self_attn.q_proj.lora_A.weight)
    assert not torch.equal(value, one.model.layers[0].self_attn.q_proj.lora_A.weight)
    assert not torch.equal(value, initial_value("model.layers.1.self_attn.q_proj.lora_A.weight", value.shape, 2))
    # uniform up to 1 / sqrt(in)
    drawn = initial_value("x.lora_A.weight", torch.Size((64, 256)), 0)
    assert drawn is not None and 0.0620 < drawn.abs().max() <= 1 / 16 and abs(drawn.std() * 16 - 3**-0.5) < 0.01
    assert not initial_value("x.lora_B.weight", torch.Size((8, 4)), 0).any()  # type: ignore[union-attr]
    assert not initial_value("x.lora_embedding_A", torch.Size((4, 8)), 0).any()  # type: ignore[union-attr]
    assert initial_value("x.lora_embedding_B", torch.Size((8, 4)), 0).any()  # type: ignore[union-attr]


@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_a_model_on_the_meta_device(quantization: str) -> None:
    """Structure first, weights later by name, gives the model that is adapted after loading."""
    lora = Lora(r=2, dora=True, quantization=quantization, target_modules=("q_proj", "lm_head"))
    expected = llama()
    files = expected.state_dict()
    adapt(expected, lora, seed=5)
    with torch.device("meta"):
        model = llama()
    adapt(model, lora, seed=5)
    assert all(value.is_meta for value in (*model.parameters(), *model.buffers()))
    model.to_empty(device="cpu")
    model.model.rotary_emb = expected.model.rotary_emb
    for name, value in files.items():
        module = model.get_submodule(name.rpartition(".")[0])
        if isinstance(module, LoraLinear) and module.codes is not None:
            module.quantize(value)
        else:
            model.get_parameter(name).data.copy_(value)

    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            value = initial_value(name, parameter.shape, 5)
            parameter.data.copy_(
                initial_magnitude(model.get_submodule(name.rpartition(".")[0])) if value is None else value
            )
    assert torch.equal(model(IDS).logits, expected(IDS).logits)


@pytest.mark.parametrize("widens", [False, True])
@pytest.mark.parametrize("dora", [False, True])
def test_bf16_computes_with_factors_in_fp32(dora: bool, widens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On processors with products of bf16, and on those where fp32 is faster."""
    monkeypatch.setattr(lora_product, "_WIDENS", widens)
    torch.manual_seed(0)
    layer = LoraLinear(nn.Linear(64, 48, dtype=torch.bfloat16).requires_grad_(False), Lora(r=4, dora=dora))
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    for parameter in trained:
        nn.init.uniform_(parameter, 0.1, 0.3)
    x = torch.randn(100, 64).bfloat16().requires_grad_()
    results = []
    for module, values in ((layer, x), (copy.deepcopy(layer).float(), x.detach().float().requires_grad_())):
        factors = [parameter for parameter in module.parameters() if parameter.requires_grad]
        output = module(values)
        results.append((output, *torch.autograd.grad(output.float().square().mean(), [values, *factors])))
    assert [value.dtype for value in results[0]] == [torch.bfloat16] * 2 + [torch.float32] * len(trained)
    for found, expected in zip(*results, strict=True):
        assert (found - expected).abs().max() < 0.02 * expected.abs().max()


@pytest.mark.parametrize("dora", [False, True])
def test_nf4_is_lora_on_the_rounded_weights(dora: bool) -> None:
    lora = Lora(r=3, dora=dora, target_modules=(*LINEARS, "lm_head"))
    quantized, plain = llama(), llama()
    adapt(quantized, lora.model_copy(update={"quantization": "nf4"}), seed=0)
    rounded = {n: m for n, m in quantized.named_modules() if isinstance(m, LoraLinear)}
    assert len(rounded) == 15 and {n for n, m in rounded.items() if m.codes is None} == {"lm_head"}
    for name, module in rounded.items():
        plain.get_submodule(name).weight.data.copy_(module.base_weight(torch.float32))
    adapt(plain, lora, seed=0)
    for model in (quantized, plain):
        torch.manual_seed(4)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter)
    found, expected = gradients(quantized), gradients(plain)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name])


@pytest.mark.parametrize(
    "lora", [Lora(r=3), Lora(r=3, dora=True), Lora(r=3, quantization="nf4")], ids=["lora", "dora", "nf4"]
)
def test_checkpointing_and_accumulation_change_nothing(lora: Lora) -> None:
    plain, checkpointed = llama(), llama()
    for model in (plain, checkpointed):
        adapt(model, lora, seed=0)
        model.train()
    activations.checkpoint_layers(checkpointed.model.layers, Training(activation_checkpointing="full"))
    found, expected = gradients(checkpointed), gradients(plain)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    twice = gradients(plain)
    assert all(torch.equal(twice[name], 2 * value) for name, value in expected.items() if name != "logits")


@pytest.mark.parametrize(
    "lora", [Lora(r=3), Lora(r=3, dora=True), Lora(r=3, quantization="nf4")], ids=["lora", "dora", "nf4"]
)
def test_compiles_to_one_graph(lora: Lora) -> None:
    layer = LoraLinear(nn.Linear(8, 6).requires_grad_(False), lora, lora.quantization == "nf4")
    for parameter in layer.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 3, 8, requires_grad=True)
    trained = [x, *(parameter for parameter in layer.parameters() if parameter.requires_grad)]
    results = []
    for run in (layer, compiled):
        output = run(x)
        results.append((output, *torch.autograd.grad(output.square().sum(), trained)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


class Allocations(TorchDispatchMode):
    """Counts the tensors of at least so many elements that operations return in memory of their own."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements, self.found = elements, []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        pointers = {value.data_ptr() for value in args if isinstance(value, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.numel() >= self.elements and result.data_ptr() not in pointers:
            self.found.append(str(function))
        return result


def test_no_temporary_has_the_size_of_the_output() -> None:
    """One tensor of that size forward: the output; one of the input's size backward: its gradient."""
    layer = LoraLinear(nn.Linear(256, 256).requires_grad_(False), Lora(r=2))
    x = torch.randn(512, 256, requires_grad=True)
    factors = layer.lora_A.weight, layer.lora_B.weight
    with Allocations(x.numel()) as forward:
        lora_product.forward(x, None, layer.weight, None, None, *factors, 1.0)
    output = layer(x)
    gradient = torch.ones_like(output)
    with Allocations(x.numel()) as backward:
        output.backward(gradient)
    assert len(forward.found) == 1, forward.found
    assert len(backward.found) == 1, backward.found


def test_lora_plus_is_for_b_of_linear_layers() -> None:
    lora = Lora(plus_ratio=16)
    names = ("q.lora_B.weight", "q.lora_A.weight", "q.lora_magnitude_vector", "e.lora_embedding_B", "q.weight")
    assert [learning_rate_factor(name, lora) for name in names] == [16, 1, 1, 1, 1]


def test_a_target_that_matches_nothing() -> None:
    with pytest.raises(
        UserError, match=r"'c_attn' matches no module of the model; set it to .* that it has: .*down_proj"
    ):
        adapt(llama(), Lora(target_modules=("q_proj", "c_attn")), seed=0)
