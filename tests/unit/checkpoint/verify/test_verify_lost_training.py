"""verify --base finds what other programs lost, and reported as success; each test names what users saw."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from hyperpod_ft.checkpoint.verify.verify import verify
from hyperpod_ft.errors import UserError
from tests.programs import call
from tests.unit.checkpoint.merge.peft_models import llama, tied_llama, trained
from tests.unit.checkpoint.verify.mixtures import EXPERTS, mixture
from tests.unit.checkpoint.verify.written_models import change_json

Tensors = dict[str, torch.Tensor]
WEIGHTS, ADAPTER = "model.safetensors", "adapter_model.safetensors"


def rewrite(file: Path, change: Callable[[Tensors], Mapping[str, torch.Tensor]]) -> None:
    tensors = change(load_file(file))
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, file, {"format": "pt"})


def merged(tmp_path: Path, make: Callable[[], PreTrainedModel], **options: Any) -> tuple[Path, Path, Path]:
    """A base in bfloat16, PEFT's merge, and the adapter."""
    torch.manual_seed(0)
    base, tuned, adapter = tmp_path / "base", tmp_path / "tuned", tmp_path / "adapter"
    make().to(torch.bfloat16).save_pretrained(base)
    config = LoraConfig(**({"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]} | options))
    model = trained(AutoModelForCausalLM.from_pretrained(base), config)
    model.save_pretrained(adapter)
    model.merge_and_unload().save_pretrained(tuned)
    return base, tuned, adapter


def findings(base: Path, tuned: Path, adapter: Path | None = None) -> str:
    return "\n".join(verify(tuned, base=base, adapter=adapter).findings)


MIXTURE_LORA = {"target_parameters": EXPERTS, "target_modules": ["q_proj"]}


@pytest.mark.parametrize(
    ("kind", "kept", "line"),
    [
        # unsloth#5410: no expert was merged; unsloth-zoo#812: nor any of Mixtral's, called w1, w2 and w3
        (
            "qwen3_moe",
            lambda name: "experts" in name,
            "24 of 24 expert tensors that the adapter changes equal the base",
        ),
        ("mixtral", lambda name: "experts" in name, "24 of 24 expert tensors that the adapter changes equal the base"),
        # unsloth-zoo#779: a few experts were
        ("qwen3_moe", lambda name: "experts" in name and "experts.3" not in name, "18 of 24 expert tensors"),
        ("gpt_oss", lambda name: name.endswith("experts.down_proj"), "8 of 16 expert tensors"),
        ("qwen3_moe", lambda name: "q_proj" in name, "2 of 2 tensors that the adapter changes equal the base"),
    ],
)
def test_tensors_that_were_not_merged(tmp_path: Path, kind: str, kept: Callable[[str], bool], line: str) -> None:
    base, tuned, adapter = merged(tmp_path, lambda: mixture(kind), **MIXTURE_LORA)
    assert verify(tuned, base=base, adapter=adapter).ok
    before = load_file(base / WEIGHTS)
    rewrite(tuned / WEIGHTS, lambda all_of: {name: before[name] if kept(name) else t for name, t in all_of.items()})
    (finding,) = verify(tuned, base=base, adapter=adapter).findings
    assert line in finding
    done = call("verify", tuned, "--base", base, "--adapter", adapter)
    assert done.returncode == 1 and done.stdout.splitlines()[0] == f"{tuned}: wrong, 1 fault"


def in_unsloths_order(lora_b: torch.Tensor, experts: int) -> torch.Tensor:
    """The columns of (out, r x experts) expert by expert instead of rank by rank."""
    return lora_b.reshape(len(lora_b), -1, experts).transpose(1, 2).reshape(lora_b.shape)


@pytest.mark.parametrize("says_so", [True, False])
def test_experts_that_were_merged_in_another_order_than_trained(tmp_path: Path, says_so: bool) -> None:
    """unsloth#6930: the sizes of all updates are right, their values are those of other experts."""
    base, tuned, adapter = merged(tmp_path, lambda: mixture("qwen3_moe"), **MIXTURE_LORA)
    right = says_so
    if says_so:
        change_json(adapter / "adapter_config.json", auto_mapping={"unsloth_fixed": True})
        assert "24 of 24 expert tensors that the adapter changes hold it with lora_B read in PEFT's order" in findings(
            base, tuned, adapter
        )
    rewrite(
        adapter / ADAPTER,
        lambda all_of: {
            name: in_unsloths_order(t, 4) if "experts" in name and "lora_B" in name else t for name, t in all_of.items()
        },
    )
    found = findings(base, tuned, adapter)
    assert found == "" if right else "24 of 24 expert tensors" in found and "read in Unsloth's order" in found


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        # vllm#41754 and #34186: trained by another class than the one that is served
        (lambda name: name.replace("model.layers", "model.language_model.layers"), ["4 of 4 modules would not be"]),
        (lambda name: name.removeprefix("base_model.model."), ["8 tensors would not be applied: their names"]),
        (
            lambda name: name.replace("q_proj", "query"),
            ["2 modules would not be applied: the base has no"],
        ),
        (lambda name: name.replace("layers.1", "layers.7"), ["layers.7.self_attn.q_proj, model", "no factors"]),
    ],
)
def test_adapters_that_no_program_would_apply(tmp_path: Path, change: Callable[[str], str], lines: list[str]) -> None:
    base, tuned, adapter = merged(tmp_path, llama)
    rewrite(adapter / ADAPTER, lambda all_of: {change(name): tensor for name, tensor in all_of.items()})
    for found in ("\n".join(verify(adapter, base=base).findings), findings(base, tuned, adapter)):
        assert all(line in found for line in lines), found


def test_an_adapter_of_the_text_part_of_a_model_with_several_modalities(tmp_path: Path) -> None:
    base, tuned, adapter = merged(tmp_path, llama)
    for model in (base, tuned):
        rewrite(
            model / WEIGHTS,
            lambda all_of: {name.replace("model.", "model.language_model."): t for name, t in all_of.items()},
        )
        change_json(model / "config.json", text_config={"vocab_size": 400})
    assert "model.layers.0.self_attn.q_proj is model.language_model.layers.0.self_attn.q_proj in the base" in findings(
        base, tuned, adapter
    )
    named = {"base_model.model.model.": "base_model.model.model.language_model."}
    rewrite(
        adapter / ADAPTER, lambda all_of: {name.replace(*next(iter(named.items()))): t for name, t in all_of.items()}
    )
    assert verify(tuned, base=base, adapter=adapter).ok
    # as files of older models are named, whatever the live one's names are
    for model in (base, tuned):
        rewrite(
            model / WEIGHTS,
            lambda all_of: {
                name.replace("model.language_model.", "language_model.model."): t for name, t in all_of.items()
            },
        )
    assert verify(tuned, base=base, adapter=adapter).ok


def test_adapters_without_an_update(tmp_path: Path) -> None:
    base, _, adapter = merged(tmp_path, llama)
    rewrite(adapter / ADAPTER, lambda all_of: {n: t * 0 if "1.self_attn.v" in n else t for n, t in all_of.items()})
    assert verify(adapter).ok and "1 of 4 modules is zero" in verify(adapter).notes[0]
    rewrite(adapter / ADAPTER, lambda all_of: {n: t * 0 if "lora_B" in n else t for n, t in all_of.items()})
    assert "the update of 4 of 4 modules is zero" in verify(adapter).findings[0]
    assert "the update of 4 of 4 modules is zero" in findings(base, base, adapter)
    assert "all 21 tensors equal the base: nothing was trained" in findings(base, base)
    change_json(adapter / "adapter_config.json", target_modules=["query"])
    found = verify(adapter, base=base)
    assert "does not target 4 of 4 modules that have factors" in "\n".join(found.findings)
    assert "targets that match nothing in the base: query" in "\n".join(found.notes)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda w, b: w + (w.float() - b.float()), "update than the adapter's (it was added 2 times)"),
        (lambda w, b: w.roll(1, 0), "hold another update than the adapter's: "),
    ],
)
def test_another_update(tmp_path: Path, change: Callable[[Any, Any], Any], line: str) -> None:
    base, tuned, adapter = merged(tmp_path, llama)
    before, name = load_file(base / WEIGHTS), "model.layers.1.self_attn.q_proj.weight"
    rewrite(tuned / WEIGHTS, lambda all_of: all_of | {name: change(all_of[name], before[name]).to(torch.bfloat16)})
    found = findings(base, tuned, adapter)
    assert found.startswith(f"{tuned}: 1 of 4 tensors that the adapter changes hold another update") and line in found
    rewrite(tuned / WEIGHTS, lambda all_of: all_of | {"lm_head.weight": all_of["lm_head.weight"] * 1.5})
    assert "1 tensors differ from the base though the adapter does not change them: lm_head" in findings(
        base, tuned, adapter
    )


def _without(part: str) -> Callable[[Tensors], Tensors]:
    return lambda all_of: {name: tensor for name, tensor in all_of.items() if part not in name}


@pytest.mark.parametrize(
    ("change", "config", "line"),
    [
        (_without("layers.1.mlp"), {}, "3 of 21 tensors of the base are lost: model.layers.1.mlp.down_proj.weight"),
        (lambda t: t | {"extra.weight": torch.ones(2)}, {}, "1 of 22 tensors are not in the base: extra.weight"),
        (
            lambda t: {name.replace("model.", "model.language_model."): one for name, one in t.items()},
            {},
            "20 tensors of the base have another name: model.embed_tokens.weight is now model.language_model.embed",
        ),
        (
            lambda t: {name.replace("q_proj", "q_proj.base_layer"): one for name, one in t.items()},
            {},
            "2 tensors of the base have another name",
        ),
        (lambda t: t | {"model.norm.weight": torch.ones(2, 16)}, {}, "1 of 21 tensors have another shape: model.norm"),
        (
            lambda t: t | {"model.norm.weight": torch.ones(32, dtype=torch.int8)},
            {},
            "1 of 21 tensors are I8, BF16 in the base",
        ),
        (
            lambda t: t | {"lm_head.weight": torch.ones(448, 32, dtype=torch.bfloat16)},
            {},
            "embedding and output layer have 400 and 448 rows",
        ),
        (_without("lm_head"), {"tie_word_embeddings": True}, "lm_head.weight is lost"),
    ],
)
def test_another_structure(tmp_path: Path, change: Any, config: dict[str, Any], line: str) -> None:
    base, tuned, _ = merged(tmp_path, llama)
    rewrite(tuned / WEIGHTS, change)
    change_json(tuned / "config.json", **config)
    assert line in findings(base, tuned)


def test_a_head_that_was_tied(tmp_path: Path) -> None:
    base, tuned, _ = merged(tmp_path, tied_llama)
    rewrite(tuned / WEIGHTS, lambda all_of: all_of | {"lm_head.weight": all_of["model.embed_tokens.weight"] * 2})
    assert "lm_head.weight differs from model.embed_tokens.weight" in findings(base, tuned)
    change_json(tuned / "config.json", tie_word_embeddings=False)
    found = verify(tuned, base=base)
    assert found.ok and "lm_head.weight has values of its own" in "\n".join(found.notes)
    values = json.loads((tuned / "config.json").read_text())
    del values["tie_word_embeddings"]
    (tuned / "config.json").write_text(json.dumps(values))
    assert "does not say that tie_word_embeddings is false" in findings(base, tuned)


def test_shards_that_are_not_there(tmp_path: Path) -> None:
    base, tuned, _ = merged(tmp_path, llama)
    AutoModelForCausalLM.from_pretrained(tuned).save_pretrained(tmp_path / "sharded", max_shard_size="50KB")
    shards = sorted((tmp_path / "sharded").glob("*.safetensors"))
    (tmp_path / "sharded" / "model.safetensors.index.json").rename(tmp_path / "index")
    assert f"model.safetensors.index.json: is missing, beside {len(shards)} files" in findings(
        base, tmp_path / "sharded"
    )
    index = json.loads((tmp_path / "index").read_text())
    names = {name: f"../sharded/{file}" for name, file in index["weight_map"].items()}
    (tmp_path / "sharded" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert "names a file outside its directory" in findings(base, tmp_path / "sharded")
    shutil.copyfile(tmp_path / "index", tmp_path / "sharded" / "model.safetensors.index.json")
    assert verify(tmp_path / "sharded", base=base).ok
    shards[0].unlink()
    assert f"{shards[0]}: is missing" in findings(base, tmp_path / "sharded")


TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


def with_tokenizer(directory: Path, stops: list[int], template: str | None = TEMPLATE) -> None:
    added = [{"id": 2, "content": "</s>"}, {"id": 399, "content": "<|im_end|>"}]
    (directory / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": added, "model": {}}))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    if template:
        (directory / "chat_template.jinja").write_text(template)


def test_what_ends_an_answer(tmp_path: Path) -> None:
    base, tuned, adapter = merged(tmp_path, llama)
    with_tokenizer(base, [399, 2])
    assert "has no tokenizer; the base has one" in "\n".join(verify(tuned, base=base).notes)
    with_tokenizer(tuned, [399, 2])
    assert verify(tuned, base=base, adapter=adapter).ok
    with_tokenizer(tuned, [2])
    assert "<|im_end|>, which ends a turn, no longer ends an answer" in findings(base, tuned)
    with_tokenizer(tuned, [399])
    assert "the tokenizer's end is </s> (2), but it does not end an answer" in findings(base, tuned)
    (tuned / "generation_config.json").unlink()
    change_json(tuned / "config.json", eos_token_id=None)
    assert "no token ends an answer; in the base </s>, <|im_end|> does" in findings(base, tuned)
    with_tokenizer(tuned, [399, 2], template="other")
    assert "its chat template differs from the base's" in "\n".join(verify(tuned, base=base).notes)
    with_tokenizer(adapter, [], template=TEMPLATE)
    assert "its chat template is not the adapter's" in findings(base, tuned, adapter)
    (tuned / "chat_template.jinja").unlink()
    assert "the base's chat template is lost" in findings(base, tuned)
    change_json(tuned / "config.json", vocab_size=399)
    assert "has tokens beyond the 399 rows of config.json: <|im_end|>" in findings(base, tuned)


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    base, tuned, adapter = merged(tmp_path, llama)
    with pytest.raises(UserError, match="--adapter: without the model"):
        verify(tuned, adapter=adapter)
    with pytest.raises(UserError, match="--logits: "):
        verify(tuned, base=base, logits=True)
    (tuned / "config.json").rename(tmp_path / "config.json")
    assert f"{tuned / 'config.json'}: is missing" in findings(base, tuned, adapter)
    (tmp_path / "config.json").rename(tuned / "config.json")
    change_json(base / "config.json", quantization_config={"quant_method": "bitsandbytes"})
    with pytest.raises(UserError, match=r"is quantized \(bitsandbytes\), the other model is not"):
        verify(tuned, base=base)
