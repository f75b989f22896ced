"""The ranks that vLLM accepts."""

import pytest

from hyperpod_ft.config.sections.sagemaker import MAX_LORA_RANK
from hyperpod_ft.planning.lora import max_lora_rank


@pytest.mark.parametrize(("rank", "accepted"), [(1, 8), (8, 8), (9, 16), (257, 320), (MAX_LORA_RANK, 512)])
def test_the_smallest_that_holds_the_adapters(rank: int, accepted: int) -> None:
    assert max_lora_rank(rank) == accepted
