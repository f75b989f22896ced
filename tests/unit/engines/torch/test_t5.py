"""T5: packed pairs train as they do alone, padded, in transformers' own forward pass; each rank reads its own head."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, T5Config, T5ForConditionalGeneration

from hyperpod_ft.data.packing import IGNORED
from hyperpod_ft.data.seq2seq.packing import fill_seq2seq, pack_seq2seq
from hyperpod_ft.engines.batches import Seq2SeqBatch
from hyperpod_ft.engines.torch.model.t5 import model as t5

V1_0 = {"feed_forward_proj": "relu", "tie_word_embeddings": True}
V1_1 = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
# long enough that distances fall into the shared buckets, and beyond the last
BUCKETS = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12}
# sources and targets; the second row of three has no padding in its encoder part, the first none in its decoder's
PAIRS = [(20, 5), (3, 9), (9, 2), (11, 3), (13, 1), (2, 2), (17, 6)]
WIDTHS = 32, 16
PAD, EOS, START = 0, 1, 0
Result = dict[str, torch.Tensor]


def tiny(version: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_decoder_layers=3,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=START,
        **BUCKETS,
        **version,
    )
    model = T5ForConditionalGeneration(config)
    if not config.scale_decoder_outputs:
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.2)
    return model.train()


def documents() -> list[tuple[torch.Tensor, torch.Tensor]]:
    random = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(2, 64, (length,), generator=random) for length in pair) for pair in PAIRS]  # type: ignore[misc]


def gradients(model: PreTrainedModel, loss: torch.Tensor) -> Result:
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def padded(version: dict[str, Any]) -> Result:
    """All pairs in one padded batch, by transformers: its attention, decoder inputs, logits and loss."""
    model = tiny(version)
    sources, targets = zip(*documents(), strict=True)
    ids = torch.nn.utils.rnn.pad_sequence(sources, batch_first=True, padding_value=PAD)
    labels = torch.nn.utils.rnn.pad_sequence(targets, batch_first=True, padding_value=IGNORED)
    mask = (torch.arange(ids.shape[1]) < torch.tensor([len(source) for source in sources])[:, None]).long()
    found = model(input_ids=ids, attention_mask=mask, labels=labels)
    return gradients(model, found.loss * sum(len(target) for target in targets))


def rows(how: str = "bfd") -> Seq2SeqBatch:
    pairs = documents()
    ids = torch.cat([part for pair in pairs for part in pair]).numpy().astype(np.int32)
    targets = np.array([len(target) for _, target in pairs])
    lengths = targets + [len(source) for source, _ in pairs]
    starts = lengths.cumsum() - lengths
    layout = pack_seq2seq(how, starts, lengths, targets, WIDTHS, 0)  # type: ignore[arg-type]
    made = fill_seq2seq(layout, ids, 0, layout[0].row_count, WIDTHS, PAD, START)
    return Seq2SeqBatch(**{name: torch.from_numpy(array.astype(np.int64)) for name, array in vars(made).items()})


def packed(version: dict[str, Any], device: str) -> Result:
    """The same pairs in packed rows, by the engine, as on a device of that type."""
    model, batch = tiny(version), rows()
    t5.return_loss(model)
    arguments = t5.inputs(batch, torch.device("cpu"), compiled=device != "cpu")
    if device == "one with fixed shapes":
        on_meta = t5.inputs(batch, torch.device("meta"))
        arguments = {name: arguments[name] for name in on_meta} | {"targets": batch.labels.flatten()}
        assert all(tensor.shape == on_meta[name].shape for name, tensor in arguments.items())
    return gradients(model, model(**arguments))


def difference(found: Result, expected: Result) -> float:
    """The largest, relative to the largest value of its tensor."""
    assert found.keys() == expected.keys()
    return max(float((found[name] - value).abs().max() / value.abs().max()) for name, value in expected.items())


@pytest.mark.parametrize("device", ["cpu", "cuda", "one with fixed shapes"])
@pytest.mark.parametrize("version", [V1_0, V1_1], ids=["v1.0", "v1.1"])
def test_packed_pairs_train_as_they_do_padded(version: dict[str, Any], device: str) -> None:
    batch = rows()
    assert len(batch.labels) < len(PAIRS) and (batch.documents == 0).any() and (batch.decoder_documents == 0).any()
    assert difference(packed(version, device), padded(version)) < 1e-5
