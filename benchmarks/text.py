"""Prepares the inputs of the dataset benchmark: real rows, and a model directory to tokenize them with.

python -m benchmarks.text ROWS COPIES DIRECTORY

ROWS has one JSON object per line with `question` and `answer`. It writes `text-once.jsonl` and `text-repeated.jsonl`
(the same rows COPIES times) with `prompt` and `completion` to DIRECTORY, `conversations-once.jsonl` and
`conversations-repeated.jsonl` with four questions and their answers as messages, and `model/`: a tiny random Llama with
a tokenizer like Llama 3's (byte-level BPE, its splitting of text, ids in the order of merges, special tokens last),
trained on the rows, since Llama 3's own may not be redistributed. Its vocabulary is small, so that a row has the 162
tokens or so that larger texts leave.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks.conversations import templates
from benchmarks.goals import CONVERSATIONS, TEXT
from benchmarks.synthetic import Geometry, write_base

VOCABULARY = 7400
BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
# how Llama 3's tokenizer.json splits text before merging
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


TINY = Geometry(1, hidden=64, intermediate=128, heads=4, kv_heads=4)


def write_tiny(directory: Path, vocabulary: int) -> None:
    write_base(directory, replace(TINY, vocabulary=vocabulary))


def prepare(
    rows: Path,
    copies: int,
    directory: Path,
    write_model: Callable[[Path, int], None] = write_tiny,
    most: int | None = None,
) -> None:
    """Write the rows, at `most` the first of them, and a model into `directory`.

    `write_model`: gets the model's directory, which it makes, and the size of the rows' vocabulary.
    """
    directory.mkdir(parents=True)
    lines = [json.loads(line) for line in rows.read_text(encoding="utf-8").split("\n")[:most] if line]
    pairs = [(f"{line['question']}\n", str(line["answer"])) for line in lines]
    texts: dict[str, list[dict[str, Any]]] = {
        TEXT: [{"prompt": prompt, "completion": completion} for prompt, completion in pairs],
        CONVERSATIONS: [{"messages": _messages(pairs[first : first + 4])} for first in range(0, len(pairs) - 3, 4)],
    }
    for name, made in texts.items():
        text = "".join(json.dumps(row) + "\n" for row in made)
        (directory / f"{name}-once.jsonl").write_text(text, encoding="utf-8")
        with (directory / f"{name}-repeated.jsonl").open("w", encoding="utf-8") as stream:
            for _ in range(copies):
                stream.write(text)
    tokenizer = learn([part for pair in pairs for part in pair])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = templates()["qwen2_5"]  # TRL takes its own copy, which marks the answers
    model = directory / "model"
    write_model(model, len(tokenizer))
    tokenizer.save_pretrained(model)


def _messages(pairs: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [
        {"role": role, "content": text.strip()}
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def learn(texts: list[str]) -> PreTrainedTokenizerFast:
    """A tokenizer of at most VOCABULARY ids and two special tokens; it adds BOS before a text."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([BOS, EOS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS)


if __name__ == "__main__":
    prepare(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
