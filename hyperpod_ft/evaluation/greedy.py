"""Greedy answers of a language model, in batches."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, PreTrainedModel

from hyperpod_ft.data.tokenizer import Tokenizer, pad_id

_BATCH_PROMPTS = 32
_PROGRESS_SECONDS = 5


@dataclass(frozen=True)
class GreedyAnswer:
    """`ids` exclude the token that ended the answer; `finished`: there was one."""

    text: str
    ids: tuple[int, ...]
    finished: bool


def answers(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    inputs_of: Callable[[Sequence[int]], Mapping[str, torch.Tensor]] | None = None,
) -> list[GreedyAnswer]:
    """The model's greedy answer to each prompt, in order, as `answered` gives them; prints how far it is."""
    found: dict[int, GreedyAnswer] = {}
    printed = time.monotonic()
    for number, answer in answered(model, tokenizer, prompts, max_new_tokens, _BATCH_PROMPTS, inputs_of):
        found[number] = answer
        if time.monotonic() - printed > _PROGRESS_SECONDS:
            printed = time.monotonic()
            print(f"generate: {len(found)} of {len(prompts)} answers", flush=True)
    return [found[number] for number in range(len(prompts))]


def answered(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    at_once: int,
    inputs_of: Callable[[Sequence[int]], Mapping[str, torch.Tensor]] | None = None,
) -> Iterator[tuple[int, GreedyAnswer]]:
    """The number of each prompt (token ids) with the model's greedy answer, in batches of `at_once`.

    Batches hold prompts of similar length, padded on the left and masked, so that every answer of a causal model begins
    where its prompt ends. Sampling settings of the model's own generation_config.json are ignored. `inputs_of`: what
    the model gets for prompts by their numbers, likewise, where that is more than ids and a mask.
    """
    padding = pad_id(tokenizer)
    stops = make_greedy(model, tokenizer)
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    for first in range(0, len(order), at_once):
        batch = order[first : first + at_once]
        inputs = inputs_of(batch) if inputs_of else _inputs([prompts[number] for number in batch], padding)
        for number, ids in zip(batch, _batch(model, inputs, max_new_tokens), strict=True):
            yield number, _answer(tokenizer, ids, stops)


def _inputs(prompts: Sequence[Sequence[int]], padding: int) -> dict[str, torch.Tensor]:
    longest = max(len(prompt) for prompt in prompts)
    ids = [[padding] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


@torch.inference_mode()
def _batch(model: PreTrainedModel, inputs: Mapping[str, torch.Tensor], max_new_tokens: int) -> list[list[int]]:
    on_device = {name: tensor.to(model.device) for name, tensor in inputs.items()}
    made = model.generate(**on_device, max_new_tokens=max_new_tokens)  # type: ignore[operator]
    before = tokens_before(model, inputs["input_ids"].shape[1])
    return list(made[:, before:].tolist())


def make_greedy(model: PreTrainedModel, tokenizer: Tokenizer) -> frozenset[int]:
    """Replace the settings of the model's generation_config.json by greedy search; returns the ids that end an answer.

    They are the tokenizer's EOS, which training ends each answer with, and what the model's own configuration names.
    """
    stops = _stops(model, tokenizer)
    model.generation_config = GenerationConfig(
        do_sample=False,
        eos_token_id=sorted(stops),
        pad_token_id=pad_id(tokenizer),
        decoder_start_token_id=getattr(model.config, "decoder_start_token_id", None),
    )
    return stops


def tokens_before(model: PreTrainedModel, prompt: int) -> int:
    """Where the answer begins in what `generate` returns: after what a decoder begins with, or after the prompt."""
    return 1 if model.config.is_encoder_decoder else prompt


def text_of(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of an answer, without special tokens."""
    return str(tokenizer.backend_tokenizer.decode(list(ids), skip_special_tokens=True))


def _stops(model: PreTrainedModel, tokenizer: Tokenizer) -> frozenset[int]:
    own = model.generation_config.eos_token_id if model.generation_config is not None else None
    named = own if isinstance(own, list) else [own]
    return frozenset(token for token in (*named, tokenizer.eos_token_id) if token is not None)


def _answer(tokenizer: Tokenizer, ids: list[int], stops: frozenset[int]) -> GreedyAnswer:
    end = next((position for position, token in enumerate(ids) if token in stops), None)
    kept = ids if end is None else ids[:end]
    return GreedyAnswer(text_of(tokenizer, kept), tuple(kept), end is not None)
