"""The estimate of T5's activations, compared with the memory of the tensors that a forward pass leaves behind."""

from typing import Any

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.engines.torch.lora import adapters
from hyperpod_ft.engines.torch.model import activations
from hyperpod_ft.engines.torch.model.t5 import attention
from hyperpod_ft.planning.model_fit import estimate
from hyperpod_ft.planning.parallelism import degrees_of
from hyperpod_ft.planning.t5_shape import t5_shape
from scripts.activation_memory import MadeTensors

ROWS, SOURCE, TARGET = 2, 128, 64
FEW, MORE_ENCODER, MORE_DECODER = (2, 2), (4, 2), (2, 4)  # layers of encoder and decoder


def config(method: str, precision: str, checkpointing: str) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "activations",
            "engine": "torch",
            "model": {"source": "any/model"},
            "dataset": {
                "source": "any/data",
                "format": "dolly",
                "max_length": SOURCE,
                "max_target_length": TARGET,
            },
            "lora": {"r": 2, "target_modules": ["q", "k", "v", "o", "wo"]},
            "training": {
                "method": method,
                "precision": precision,
                "activation_checkpointing": checkpointing,
                "micro_batch_size": ROWS,
            },
            "parallelism": {"ranks_per_node": 1},
        }
    )


def model_config(layers: tuple[int, int], gated: bool) -> dict[str, Any]:
    return {
        "model_type": "t5",
        "d_model": 128,
        "d_kv": 16,
        "d_ff": 352,
        "num_layers": layers[0],
        "num_decoder_layers": layers[1],
        "num_heads": 8,
        "vocab_size": 64,
        "feed_forward_proj": "gated-gelu" if gated else "relu",
        "tie_word_embeddings": False,
        "dropout_rate": 0.1,
        "decoder_start_token_id": 0,
    }


def estimated(config: RunConfig, values: dict[str, Any]) -> float:
    shape = t5_shape(values)
    assert shape is not None
    return estimate(config, degrees_of(config), shape).activations


def measured(config: RunConfig, values: dict[str, Any]) -> float:
    dtype = torch.bfloat16 if config.training.precision == "bf16" else torch.float32
    model = T5ForConditionalGeneration(T5Config(**values)).to(dtype).train()
    attention.replace(model)
    for module in model.modules():
        if type(module).__name__ == "T5Attention":
            # with dropout, or for the bias's gradient, a CPU keeps scores, where accelerators compute them again
            module.dropout = 0.0
            if module.has_relative_attention_bias:
                module.relative_attention_bias.requires_grad_(False)
    if config.training.method == "lora":
        adapters.adapt(model, config.lora, seed=0)
        # as adapters of earlier layers do
        model.get_input_embeddings().register_forward_hook(lambda _, args, output: output.requires_grad_())
    activations.checkpoint_layers([*model.encoder.block, *model.decoder.block], config.training)
    ids = torch.arange(SOURCE).expand(ROWS, -1) % values["vocab_size"]
    # as accelerators have it: one document a row, under a mask
    masks = attention.masks(torch.ones(ROWS, SOURCE, dtype=torch.int64), torch.ones(ROWS, TARGET, dtype=torch.int64))
    with MadeTensors() as made:
        encoded = model.encoder(input_ids=ids, attention_mask=masks.encoder)[0]
        decoded = model.decoder(
            input_ids=ids[:, :TARGET],
            attention_mask=masks.decoder,
            encoder_hidden_states=encoded,
            encoder_attention_mask=masks.cross,
            use_cache=False,
        )[0]
        found = made.bytes()
    assert decoded.requires_grad
    return found


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("gated", [False, True])
def test_a_layer_keeps_what_is_estimated(gated: bool, method: str, precision: str, checkpointing: str) -> None:
    """Of encoder and decoder, within 6 %; without checkpointing, a compiler decides what is kept."""
    given = config(method, precision, checkpointing)
    for more in (MORE_ENCODER, MORE_DECODER):
        few, many = (model_config(layers, gated) for layers in (FEW, more))
        expected = measured(given, many) - measured(given, few)
        assert estimated(given, many) - estimated(given, few) == pytest.approx(expected, rel=0.06)
