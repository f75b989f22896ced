"""The estimate of activations, compared with the memory of the tensors that a forward pass leaves behind."""

from dataclasses import replace

import pytest

from scripts.activation_memory import OWN, Choice, choices, estimated, measured

LORA = Choice(method="lora")
# without checkpointing these also keep what dropout and DoRA's scaling need
VARIANTS = [replace(LORA, dropout=0.1), replace(LORA, dora=True)]
DIVIDED = [
    Choice(checkpointing, method, tensor_parallel=4, sequence_parallel=sequence)
    for method in ("full", "lora")
    for checkpointing in ("none", "full")
    for sequence in (False, True)
]
OTHERS = [*(Choice(family=family) for family in OWN), *(replace(LORA, family=family) for family in ("gptj", "phi3"))]
# with eight ranks, each of four key/value heads is on two
SHARED_ROWS = [
    Choice(checkpointing, context_parallel=ranks) for checkpointing in ("none", "selective", "full") for ranks in (2, 8)
]


@pytest.mark.parametrize("choice", [*choices(), *VARIANTS, *OTHERS, *DIVIDED, *SHARED_ROWS], ids=str)
def test_a_layer_keeps_what_is_estimated(choice: Choice) -> None:
    """Within 6 %: small things, as an adapter's narrow tensors and the norms' roots, are not counted."""
    assert estimated(choice) == pytest.approx(measured(choice), rel=0.06)
