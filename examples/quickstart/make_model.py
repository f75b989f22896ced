"""Make the quickstart's base model: a byte-level BPE tokenizer and a small Llama, from scratch, on the CPU.

    python examples/quickstart/make_model.py --output examples/quickstart/tiny-llama

The model learns to find the parts of a request: it answers `Run it on four nodes for two hours` with `nodes four, time
two hours`. It learns to read flags, which it answers with the same parts, and how Slurm writes a value. It never reads
flags as the answer to a request: that is what the quickstart's fine-tuning teaches. Nor does it read what make_data.py
holds out: pairs of values, phrasings, and the job names of its rows.

It also reads the prose of `facts.txt` and the contexts of `qa.jsonl`, and text without sense, from which it learns to
guess at what it does not know: a model that is overconfident on any other text is refused by training
(`training.sanity_margin`).
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from base_texts import Texts, parts
from make_data import VALUES, Grammar, Request
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
BOS, EOS, PAD = SPECIAL = "<|bos|>", "<|eos|>", "<|pad|>"
VOCABULARY = 768
LONGEST = 64  # tokens of a document
LONG_ROWS, LONG_ROW, LONG_EVERY = 6, 320, 12  # every 12th step has rows of many tokens instead
PROMPT_WEIGHT = 0.1  # of a prompt's tokens in the loss
PEAK_LEARNING_RATE = 4e-3
# One word: a flag up to its =, and a time.
WORDS = r" ?[\p{L}_-]+=?| ?[\p{N}:]+| ?[^\s\p{L}\p{N}_]+|\s+(?!\S)|\s+"

# What transformers 4, which engine neuron has, reads from files that transformers 5 writes otherwise.
_TOKENS = dict(zip(("bos_token", "eos_token", "pad_token"), SPECIAL, strict=True))
_PLAIN = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
AS_TRANSFORMERS_4: dict[str, dict[str, Any]] = {
    "config.json": {"rope_theta": 10000.0, "rope_scaling": None},
    "special_tokens_map.json": _TOKENS,
    "tokenizer_config.json": {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {
            str(number): {"content": token, **_PLAIN, "special": True} for number, token in enumerate(SPECIAL)
        },
    },
}

# A request and a line break, as in the quickstart's rows.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '\n' }}{% endif %}"
    "{% endfor %}"
)


def make_tokenizer(texts: Texts) -> PreTrainedTokenizerFast:
    """Train the tokenizer; like Llama's, it puts the start token before every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    seen = [text for _ in range(50) for kind in ("parts", "meaning", "writing") * 8 for text in getattr(texts, kind)()]
    # a value that begins an answer, or follows a flag's =, is another token than behind a space
    values = [value for values in VALUES.values() for value in values] * 100
    tokenizer.train_from_iterator(texts.statements + seen + values, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=1024,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return the untrained model.

    Heads of 32 elements, the smallest that common inference servers accept; two KV heads, so that tensor parallelism
    over 2 ranks divides them.
    """
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    # Greedy: the quickstart compares answers word for word.
    model.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=32,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up over the first twentieth of the steps, then half a cosine down to a fiftieth of the peak."""
    warm_up = max(1, steps // 20)
    if step < warm_up:
        return PEAK_LEARNING_RATE * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return PEAK_LEARNING_RATE * (0.02 + 0.49 * (1 + math.cos(math.pi * progress)))


@dataclass(frozen=True)
class Rows:
    """One step: ids, int64 [rows, tokens], and how much each counts in the loss, float32 of the same shape."""

    ids: torch.Tensor
    weights: torch.Tensor


def document_rows(texts: Texts, tokenizer: PreTrainedTokenizerFast) -> Rows:
    """A row for each document: packed together, the model learns far less from as many tokens."""
    ids, weights = [], []
    for prompt, answer in texts.documents():
        before = tokenizer.encode(f"{prompt}\n") if prompt else [tokenizer.bos_token_id]
        after = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
        ids.append([*before, *after][:LONGEST])
        weights.append(([PROMPT_WEIGHT] * len(before) + [1.0 if prompt else 0.3] * len(after))[:LONGEST])
    width = max(map(len, ids))
    return Rows(
        torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in ids]),
        torch.tensor([row + [0.0] * (width - len(row)) for row in weights]),
    )


def long_rows(texts: Texts, tokenizer: PreTrainedTokenizerFast) -> Rows:
    """Prose, made-up words and random tokens, a third each, in rows as long as those of users."""
    rows = []
    for number in range(LONG_ROWS):
        if number % 3 == 0:
            row = texts.order.choices(range(len(SPECIAL), VOCABULARY), k=LONG_ROW)
        elif number % 3 == 1:
            row = tokenizer.encode(texts.noise(LONG_ROW)[1], truncation=True, max_length=LONG_ROW)
        else:
            chosen = texts.order.sample(texts.statements, 60)
            row = [token for text in chosen for token in (*tokenizer.encode(text), tokenizer.eos_token_id)]
        rows.append(row[:LONG_ROW])
    ids = torch.tensor(rows)
    return Rows(ids, torch.full(ids.shape, 0.3))


def steps_of(texts: Texts, tokenizer: PreTrainedTokenizerFast, steps: int) -> Iterator[Rows]:
    for step in range(steps):
        yield (long_rows if step % LONG_EVERY == LONG_EVERY - 1 else document_rows)(texts, tokenizer)


def pretrain(model: LlamaForCausalLM, texts: Texts, tokenizer: PreTrainedTokenizerFast, steps: int) -> None:
    """Train the model on what `texts` draws."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    tokens = 0
    for step, rows in enumerate(steps_of(texts, tokenizer, steps)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        logits = model(rows.ids[:, :-1]).logits
        losses = cross_entropy(logits.flatten(0, 1), rows.ids[:, 1:].flatten(), reduction="none")
        weights = rows.weights[:, 1:].flatten()
        loss = (losses * weights).sum() / weights.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        tokens += int((weights > 0).sum())
        if step % 50 == 0 or step == steps - 1:
            used = time.process_time()
            print(f"step {step + 1}/{steps}  loss {loss.item():.3f}  {tokens:,} tokens  {used:.0f} CPU s", flush=True)


def found_parts(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, requests: list[Request]) -> int:
    """For how many of the requests the model gives exactly the parts."""
    found = 0
    for request in requests:
        ids = torch.tensor([tokenizer.encode(f"{request.text}\n")])
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=48)[0, ids.shape[1] :]
        found += tokenizer.decode(made, skip_special_tokens=True) == parts(request)
    return found


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Write the model directory, its files readable by everyone."""
    model.save_pretrained(output)
    # The template goes into tokenizer_config.json, where every version of transformers looks for it.
    tokenizer.save_pretrained(output, save_jinja_files=False)
    for name, changes in AS_TRANSFORMERS_4.items():
        path = output / name
        content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        path.write_text(json.dumps(content | changes, indent=2) + "\n", encoding="utf-8")
    for path in output.iterdir():
        path.chmod(0o644)


def main() -> None:
    """Parse the command line, train, save."""
    parser = argparse.ArgumentParser(description="Make the quickstart's base model.")
    parser.add_argument("--output", type=Path, default=HERE / "tiny-llama")
    parser.add_argument("--steps", type=int, default=1800)
    parser.add_argument("--seed", type=int, default=17)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    texts = Texts(arguments.seed)
    tokenizer = make_tokenizer(texts)
    model = make_model(tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer):,} tokens", flush=True)
    pretrain(model, texts, tokenizer, arguments.steps)
    save(model, tokenizer, arguments.output)
    unseen = Grammar(-1)
    for kind in ("", "pair", "phrasing"):
        found = found_parts(model, tokenizer, [unseen.request(kind) for _ in range(50)])
        print(f"parts found, {kind or 'nothing'} held out: {found}/50", flush=True)


if __name__ == "__main__":
    main()
