"""Small configs: every kind of layer is left, what shapes them stays, and no size is larger."""

from typing import Any

from hyperpod_ft.engines.certificate.small import WINDOW, small_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128009],
    "pad_token_id": None,
    "max_position_embeddings": 131072,
    "attention_dropout": 0.1,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": True,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
}


def small(**values: Any) -> dict[str, Any]:
    return small_config(LLAMA | values)


def test_sizes_are_small_and_what_shapes_a_model_stays() -> None:
    found = small()
    assert found["hidden_size"] == found["num_attention_heads"] * found["head_dim"] == 64
    assert found["num_attention_heads"] == 2 * found["num_key_value_heads"]
    assert found["num_hidden_layers"] == 2 and found["vocab_size"] < 100
    assert found["attention_dropout"] == 0.0, "packed and alone would drop other elements"
    kept = ("rms_norm_eps", "hidden_act", "attention_bias", "tie_word_embeddings", "model_type", "pad_token_id")
    assert {key: found[key] for key in kept} == {key: LLAMA[key] for key in kept}
    assert found["rope_parameters"]["rope_type"] == "llama3" and found["rope_parameters"]["factor"] == 8.0
    assert all(token < found["vocab_size"] for token in (found["bos_token_id"], found["eos_token_id"]))
    assert small_config(found) == found


def test_heads_of_keys_keep_their_relation_to_those_of_queries() -> None:
    heads = {kv: small(num_key_value_heads=kv)["num_key_value_heads"] for kv in (32, 8, 1)}
    assert heads == {32: 4, 8: 2, 1: 1}
    assert small(num_key_value_heads=None)["num_key_value_heads"] is None


def test_the_first_layer_of_each_kind_is_left() -> None:
    kinds = (["sliding_attention"] * 5 + ["full_attention"]) * 5 + ["sliding_attention"] * 2
    found = small(layer_types=kinds, sliding_window=1024, mlp_only_layers=[0], first_k_dense_replace=1)
    assert found["layer_types"] == ["sliding_attention", "sliding_attention", "full_attention"]
    assert found["mlp_only_layers"] == [0] and found["first_k_dense_replace"] == 1
    assert found["num_hidden_layers"] == 3 and found["sliding_window"] == WINDOW


def test_layers_that_share_keys_and_values_are_the_last_ones() -> None:
    kinds = ["sliding_attention", "full_attention"] * 16
    found = small(layer_types=kinds, num_kv_shared_layers=12)
    assert found["layer_types"] == kinds[:4] and found["num_kv_shared_layers"] == 2


def test_settings_of_single_layers_move_with_them() -> None:
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    found = small(num_hidden_layers=6, layer_types=kinds, per_layer_config={"05": {"head_dim": 512}})
    assert found["per_layer_config"] == {1: {"head_dim": 16}}


def test_layers_that_alternate_by_a_period_do_so_in_a_few() -> None:
    found = small(attn_layer_period=8, attn_layer_offset=4, expert_layer_period=2, expert_layer_offset=1)
    assert (found["num_hidden_layers"], found["attn_layer_period"], found["attn_layer_offset"]) == (4, 2, 1)


def test_experts_are_few_and_still_chosen_from() -> None:
    found = small(n_routed_experts=256, num_experts_per_tok=8, n_group=8, topk_group=4, n_shared_experts=1)
    assert found["n_routed_experts"] == 6 and found["num_experts_per_tok"] == 2
    assert (found["n_group"], found["topk_group"], found["n_shared_experts"]) == (2, 1, 1)
    assert small(num_experts=None)["num_experts"] is None


def test_rotary_embeddings_fit_the_small_heads() -> None:
    sections = {"rope_type": "default", "mrope_section": [16, 24, 24]}
    assert sum(small(rope_parameters=sections)["rope_parameters"]["mrope_section"]) == 8
    factors = {"rope_type": "longrope", "long_factor": [1.5] * 64, "short_factor": [1.0] * 64}
    found = small(rope_parameters=factors | {"partial_rotary_factor": 0.5})["rope_parameters"]
    assert len(found["long_factor"]) == len(found["short_factor"]) == 4


def test_the_parts_of_a_model_with_images_are_small_too() -> None:
    found = small_config({"model_type": "gemma3", "text_config": LLAMA, "vision_config": {"hidden_size": 1152}})
    assert found["text_config"] == small() and found["vision_config"]["hidden_size"] == 64
