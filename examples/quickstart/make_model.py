"""Make the quickstart's base model: a byte-level BPE tokenizer and a small Llama, from scratch, on the CPU.

    python examples/quickstart/make_model.py --output examples/quickstart/tiny-llama

The model reads the prose of `facts.txt` and the `context` fields of `qa.jsonl`. It never reads a question with
its answer: answering is what the quickstart's fine-tuning teaches. The tokenizer is trained on all of the text,
so that command names and variables are a few tokens each.
"""

import argparse
import json
import math
import random
import re
import string
import time
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
BOS, EOS, PAD = SPECIAL = "<|bos|>", "<|eos|>", "<|pad|>"
VOCABULARY = 1536
ROW = 128  # tokens of a pretraining row
PROSE_ROWS = 13  # of each step
RANDOM_ROWS = 3  # of each step, see random_row()
ALPHABETS = [
    string.ascii_lowercase,
    string.ascii_letters,
    string.digits,
    string.ascii_letters + string.digits + string.punctuation,
    string.ascii_lowercase + "äöüßàâçéèêëîïôûñóúáíåøæ",
    "".join(map(chr, range(0x0391, 0x03CA))),  # Greek
    "".join(map(chr, range(0x0410, 0x0450))),  # Cyrillic
    "".join(map(chr, range(0x4E00, 0x9FA6))),  # Chinese
]
SEPARATORS = [" "] * 12 + [", ", ". ", "\n"]
WRAPPED_SHARE = 0.2  # of the spaces, see wrap()
PEAK_LEARNING_RATE = 4e-3
# Letters with underscores are one word, so that SLURM_JOB_ID is not cut at each underscore.
WORDS = r" ?[\p{L}_]+| ?\p{N}+| ?[^\s\p{L}\p{N}_]+|\s+(?!\S)|\s+"

# The headings are those of the dolly prompt, so that both formats work with one model.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ '### Answer\n' }}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% elif message['role'] == 'system' %}{{ message['content'] + '\n\n' }}"
    "{% else %}{{ '### Instruction\n' + message['content'] + '\n\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Answer\n' }}{% endif %}"
)


def read_prose() -> list[str]:
    """Return the statements the model reads: the lines of facts.txt and the contexts of qa.jsonl."""
    lines = (HERE / "facts.txt").read_text(encoding="utf-8").splitlines()
    statements = [line for line in lines if line and not line.startswith("#")]
    return statements + [row["context"] for row in read_rows() if row["context"]]


def read_rows() -> list[dict[str, str]]:
    """Return the question-answer rows, in the order of the file."""
    return [json.loads(line) for line in (HERE / "qa.jsonl").read_text(encoding="utf-8").splitlines()]


def make_tokenizer() -> PreTrainedTokenizerFast:
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
    headings = ["### Instruction\n", "\n\n### Context\n", "\n\n### Answer\n"] * 20
    questions = [row["instruction"] for row in read_rows()]
    answers = [row["response"] for row in read_rows()] * 5  # weighted, so that an answer has few tokens
    tokenizer.train_from_iterator(read_prose() + questions + answers + headings, trainer)
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
    """Linear warm-up over the first twentieth of the steps, then half a cosine down to a tenth of the peak."""
    warm_up = max(1, steps // 20)
    if step < warm_up:
        return PEAK_LEARNING_RATE * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return PEAK_LEARNING_RATE * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def wrap(statement: str, order: random.Random) -> str:
    """Break the line at random spaces.

    A word at the start of a line is a different token from the same word after a space, and answers start a line.
    Fine-tuning does not change the embeddings, so the model must have seen both.
    """
    return re.sub(" ", lambda _: "\n" if order.random() < WRAPPED_SHARE else " ", statement)


def made_up_text(order: random.Random) -> str:
    """Words of random letters of one alphabet, longer than a row of tokens."""
    alphabet = order.choice(ALPHABETS)
    words = ["".join(order.choices(alphabet, k=order.randint(1, 9))) for _ in range(ROW)]
    return "".join(word + order.choice(SEPARATORS) for word in words)


def random_row(tokenizer: PreTrainedTokenizerFast, order: random.Random) -> list[int]:
    """A row that cannot be predicted: random tokens, or made-up words.

    From prose alone the model would become overconfident and worse than guessing on any other text, which training
    refuses (`training.sanity_margin`). From these rows it learns to spread its guesses over what it does not know.
    """
    if order.random() < 0.5:
        return [tokenizer.bos_token_id, *order.choices(range(len(SPECIAL), VOCABULARY), k=ROW - 1)]
    return tokenizer.encode(made_up_text(order), truncation=True, max_length=ROW)


def corrupted_row(prose: torch.Tensor, order: random.Random) -> torch.Tensor:
    """One of the rows of `prose` (int64 [rows, ROW]) with half of its tokens replaced by random ones, int64 [ROW]."""
    keep = torch.tensor([order.random() < 0.5 for _ in range(ROW)])
    row = prose[order.randrange(len(prose))]
    return torch.where(keep, row, torch.tensor([order.randrange(len(SPECIAL), VOCABULARY) for _ in range(ROW)]))


def next_rows(
    statements: list[str], tokenizer: PreTrainedTokenizerFast, stream: list[int], order: random.Random
) -> torch.Tensor:
    """Return one step's rows, int64 [PROSE_ROWS + RANDOM_ROWS + 1, ROW]: prose, random rows, and one corrupted row.

    The prose is taken from the stream, which is refilled with all statements in a new order.
    """
    need = PROSE_ROWS * ROW
    while len(stream) < need:
        for statement in order.sample(statements, len(statements)):
            stream += [*tokenizer.encode(wrap(statement, order)), tokenizer.eos_token_id]
    prose = torch.tensor(stream[:need]).view(PROSE_ROWS, ROW)
    del stream[:need]
    unpredictable = torch.tensor([random_row(tokenizer, order) for _ in range(RANDOM_ROWS)])
    return torch.cat([prose, unpredictable, corrupted_row(prose, order)[None]])


def pretrain(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int, seed: int) -> float:
    """Train the model on the prose, and return the last loss (nats per token)."""
    statements, stream = read_prose(), []
    order = random.Random(seed)  # noqa: S311 - an order of training, not a secret
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    began, last = time.monotonic(), math.nan
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        rows = next_rows(statements, tokenizer, stream, order)
        logits = model(rows[:, :-1]).logits
        loss = cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        last = loss.item()
        if step % 25 == 0 or step == steps - 1:
            print(f"step {step + 1}/{steps}  loss {last:.3f}  {time.monotonic() - began:.0f} s", flush=True)
    return last


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Write the model directory, its files readable by everyone."""
    model.save_pretrained(output, safe_serialization=True)
    # The template goes into tokenizer_config.json, where every version of transformers looks for it.
    tokenizer.save_pretrained(output, save_jinja_files=False)
    for path in output.iterdir():
        path.chmod(0o644)


def main() -> None:
    """Parse the command line, train, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=HERE / "tiny-llama")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(arguments.threads)
    torch.use_deterministic_algorithms(True)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer):,} tokens", flush=True)
    pretrain(model, tokenizer, arguments.steps, arguments.seed)
    save(model, tokenizer, arguments.output)


if __name__ == "__main__":
    main()
