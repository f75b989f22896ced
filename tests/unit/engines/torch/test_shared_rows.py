"""The part of a row that a rank computes."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from hyperpod_ft.engines.batches import Batch
from hyperpod_ft.engines.torch.model import activations, attention, language_model
from hyperpod_ft.engines.torch.model.context_parallel import SequenceChunk
from hyperpod_ft.planning.layout import Degrees
from hyperpod_ft.planning.model_shape import model_shape
from hyperpod_ft.planning.torch.memory import key_value_copies
from scripts.activation_memory import LENGTH, MODEL, Choice, rank_of


def test_chunks_are_consecutive() -> None:
    rows = torch.arange(16).view(2, 8)
    assert [SequenceChunk(index, 4).take(rows).tolist() for index in (0, 3)] == [[[0, 1], [8, 9]], [[6, 7], [14, 15]]]
    assert torch.equal(SequenceChunk().take(rows), rows)


def test_the_last_token_of_a_chunk_predicts_the_first_of_the_next() -> None:
    ids = torch.arange(10, 18)[None]
    whole = Batch(ids, ids, torch.arange(8)[None])
    halves = [language_model.inputs(whole, torch.device("cpu"), chunk=SequenceChunk(index, 2)) for index in range(2)]
    assert [half["targets"].tolist() for half in halves] == [[11, 12, 13, 14], [15, 16, 17]]
    assert [half["predicted_at"].tolist() for half in halves] == [[0, 1, 2, 3], [0, 1, 2]]


class Sent(TorchDispatchMode):
    """Bytes that all-to-alls are given."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops._c10d_functional.all_to_all_single.default:
            self.bytes += args[0].nbytes
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(("checkpointing", "passes"), [("none", 2), ("selective", 2), ("full", 3)])
@pytest.mark.parametrize("ranks", [2, 8])
def test_ranks_exchange_as_many_bytes_as_planning_counts(checkpointing: str, passes: int, ranks: int) -> None:
    """Of queries, keys, values and the output of attention, in each layer and pass; four key/value heads."""
    choice = Choice(checkpointing, precision="fp32", context_parallel=ranks)
    values = MODEL | {"num_hidden_layers": 3}
    shape = model_shape(values)
    assert shape is not None
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values, attn_implementation=attention.NAME))
    activations.checkpoint_layers(model.model.layers, choice.config().training)
    positions = torch.arange(LENGTH)[None]
    with rank_of(choice) as (_, chunk), Sent() as sent:
        bounds = attention.document_bounds(positions)
        hidden = model.model(
            input_ids=chunk.take(positions) % 64,
            position_ids=chunk.take(positions),
            attention_mask=bounds,
            use_cache=False,
        ).last_hidden_state
        hidden.sum().backward()
    copies = key_value_copies(Degrees(1, ranks, 1, 1, ranks), shape)
    assert sent.bytes == 3 * passes * (LENGTH // ranks) * 4 * (2 * shape.query_width + 2 * shape.key_width * copies)
