import pytest

from hyperpod_ft.config.instances import ENDPOINT_INSTANCES
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.model_shape import model_shape
from hyperpod_ft.sagemaker.endpoint.fit import MEMORY_SHARE, WORK_GIB, ServedModel, fit

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}


def llama() -> ServedModel:
    shape = model_shape(LLAMA_8B)
    assert shape is not None
    return ServedModel(2 * shape.parameters, shape, 32, 131072, "llama")


def test_weights_and_cache_are_divided_over_all_devices() -> None:
    found = fit(llama(), ENDPOINT_INSTANCES["g5.12xlarge"], 8192, 8)
    assert found.tensor_parallel == 4
    assert found.weights == pytest.approx(2 * 8_030_261_248 / 4 / 2**30)  # the parameters that the Hub counts
    # keys and values: 32 layers x 2 of 8 heads x 128 elements x 2 bytes
    assert found.cache == pytest.approx(8192 * 2 * 32 * 2 * 128 * 2 / 2**30)
    assert found.longest_requests == int((MEMORY_SHARE * 22 - WORK_GIB - found.weights) / found.cache)


def test_more_devices_than_key_value_heads_hold_copies_of_a_head() -> None:
    found = fit(llama(), ENDPOINT_INSTANCES["trn1.32xlarge"], 8192, 8)
    assert found.tensor_parallel == 32
    assert found.cache == pytest.approx(8192 * 2 * 32 * 1 * 128 * 2 / 2**30)


def test_a_degree_divides_the_heads() -> None:
    served = ServedModel(1 << 30, None, heads=6, positions=None, model_type="other")
    assert fit(served, ENDPOINT_INSTANCES["p5.48xlarge"], 4096, 1).tensor_parallel == 2


def test_a_model_that_does_not_fit_is_refused_with_the_arithmetic_and_a_way_out() -> None:
    with pytest.raises(UserError) as refused:
        fit(llama(), ENDPOINT_INSTANCES["g6.xlarge"], 131072, 8)
    message = str(refused.value)
    for fact in ("g6.xlarge", "14.96 GiB of weights", "16.00 GiB of KV cache", "131,072 tokens", "19.8 GiB", "g6e."):
        assert fact in message
    shorter = int(message.partition("deploy.max_length to ")[2].split()[0])
    assert fit(llama(), ENDPOINT_INSTANCES["g6.xlarge"], shorter, 8).longest_requests == 1
    with pytest.raises(UserError):
        fit(llama(), ENDPOINT_INSTANCES["g6.xlarge"], shorter + 128, 8)


def test_neuron_holds_the_cache_of_every_request() -> None:
    assert fit(llama(), ENDPOINT_INSTANCES["inf2.xlarge"], 8192, 8).longest_requests == 9
    with pytest.raises(UserError, match="each of 16 requests"):
        fit(llama(), ENDPOINT_INSTANCES["inf2.xlarge"], 8192, 16)


def test_a_request_has_no_more_tokens_than_the_model_has_positions() -> None:
    with pytest.raises(UserError, match=r"deploy\.max_length.*131,072 positions"):
        fit(llama(), ENDPOINT_INSTANCES["p5.48xlarge"], 131073, 1)


def test_weights_alone_count_when_the_cache_is_unknown() -> None:
    found = fit(ServedModel(30 << 30, None, 8, None, "new-family"), ENDPOINT_INSTANCES["g6e.xlarge"], 4096, 8)
    assert found.longest_requests is None
    assert "not counted" in found.arithmetic()
    with pytest.raises(UserError, match=r"40\.00 GiB of weights"):
        fit(ServedModel(40 << 30, None, 8, None, "new-family"), ENDPOINT_INSTANCES["g6e.xlarge"], 4096, 8)
