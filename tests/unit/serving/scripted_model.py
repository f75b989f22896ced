"""A model that answers with what a test wrote: a real Llama, whose weights lead from each piece of text to the next."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from tokenizers import AddedToken
from transformers import LlamaConfig, LlamaForCausalLM

from tests.unit import tiny_tokenizer

_HEADS = 2


def save(directory: Path, template: str, answers: Mapping[str, Sequence[str]], special: Sequence[str] = ()) -> Path:
    """`answers`: what follows a prompt with this end, in pieces. Each piece is a token, and stands in one answer, once.

    `special`: the pieces that decoders skip, as they skip the end of an answer.
    """
    tokenizer = tiny_tokenizer.make(template, adds_bos=False)
    texts = [text for end, pieces in answers.items() for text in (end, *pieces)]
    assert len(set(texts)) == len(texts)
    for text in texts:
        tokenizer.add_tokens(AddedToken(text, special=text in special, normalized=False))
    tiny_tokenizer.save(directory, tokenizer)
    width = -(-len(texts) // (2 * _HEADS)) * 2 * _HEADS
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=_HEADS,
            num_key_value_heads=_HEADS,
            max_position_embeddings=2048,
            bos_token_id=0,
            eos_token_id=1,
        )
    )
    with torch.no_grad():
        layer = model.model.layers[0]
        for weight in (model.model.embed_tokens, model.lm_head, layer.self_attn.o_proj, layer.mlp.down_proj):
            weight.weight.zero_()
        directions = iter(torch.eye(width))
        for end, pieces in answers.items():
            tokens = [*tokenizer.convert_tokens_to_ids([end, *pieces]), tokenizer.eos_token_id]
            for token, following in pairwise(tokens):
                direction = next(directions)
                model.model.embed_tokens.weight[token] = direction
                model.lm_head.weight[following] += direction
    model.save_pretrained(directory)
    return directory
