"""The memory of a divided vocabulary on one of several ranks, which need not exist: sums change no sizes."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM

from hyperpod_ft.engines.torch.model import vocabulary_parallel
from hyperpod_ft.engines.torch.model.loss import LogitsRule, summed_cross_entropy

VOCABULARY, WIDTH, POSITIONS = 4001, 256, 2048


@contextmanager
def group_of(ranks: int) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("fake", store=FakeStore(), rank=ranks - 1, world_size=ranks)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def model(tied: bool) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            tie_word_embeddings=tied,
        )
    )


def peak_of_loss(ranks: int) -> int:
    """Bytes that a forward and backward pass of the loss adds at its peak."""
    with group_of(ranks) as group:
        divided = model(tied=False)
        if ranks > 1:
            vocabulary_parallel.divide([divided.model.embed_tokens], divided.lm_head, VOCABULARY, group)
        hidden = torch.randn(POSITIONS, WIDTH, requires_grad=True)
        targets = torch.randint(0, VOCABULARY, (POSITIONS,))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            summed_cross_entropy(hidden, divided.lm_head, targets, LogitsRule()).backward()
    now = peak = 0
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    for _, size in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        now += size
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize("tied", [False, True])
def test_a_rank_holds_its_share_of_the_words(tied: bool) -> None:
    with group_of(4) as group:
        divided = model(tied)
        vocabulary_parallel.divide([divided.model.embed_tokens], divided.lm_head, VOCABULARY, group)
        ends = {id(p): p for p in (divided.model.embed_tokens.weight, divided.lm_head.weight)}
        assert sum(parameter.nbytes for parameter in ends.values()) == (1 if tied else 2) * 1000 * WIDTH * 4


def test_the_loss_needs_no_more_memory_on_more_ranks() -> None:
    """As many more positions at once as fewer words each; the head's gradient is divided."""
    alone, four = peak_of_loss(1), peak_of_loss(4)
    whole_logits = POSITIONS * VOCABULARY * 4
    print(f"peak of the loss: {alone / 1e6:.1f} MB, on one of four ranks {four / 1e6:.1f} MB")
    print(f"all logits: {whole_logits / 1e6:.1f} MB")
    assert four < alone < whole_logits / 2
