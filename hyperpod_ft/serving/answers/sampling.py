"""Drawing tokens by temperature and top_p, with the random numbers of one request."""

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from hyperpod_ft.serving.http.openai_api import Request


class _Draw(LogitsProcessor):
    """Draws the next token, with its own random numbers, and leaves only that one for greedy search to take.

    `generate` itself would draw from torch's one generator, which all threads share: a seed would mean nothing.
    """

    def __init__(self, temperature: float, top_p: float, generator: torch.Generator) -> None:
        self._temperature, self._top_p, self._generator = temperature, top_p, generator

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        del input_ids
        chances, order = torch.softmax(scores.float() / self._temperature, -1).sort(descending=True)
        # the most likely tokens, until they have top_p together
        chances[chances.cumsum(-1) - chances >= self._top_p] = 0
        drawn = order.gather(-1, torch.multinomial(chances, 1, generator=self._generator))
        return torch.full_like(scores, -torch.inf).scatter(-1, drawn, 0.0)


def sampling(request: Request, device: torch.device) -> LogitsProcessorList:
    """What `generate` is given for a request; empty for a greedy answer."""
    if not request.temperature:
        return LogitsProcessorList()
    generator = torch.Generator(device)
    if request.seed is None:
        generator.seed()
    else:
        generator.manual_seed(request.seed)
    # at 0 no token would be left
    return LogitsProcessorList([_Draw(request.temperature, max(request.top_p, 1e-9), generator)])
