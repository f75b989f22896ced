"""A tiny T5 with a SentencePiece-like tokenizer, as the Hub would hold it."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import T5Config, T5ForConditionalGeneration

PAD, EOS, UNK = "<pad>", "</s>", "<unk>"


def save(directory: Path, text: list[str], *, gated: bool = True, layers: int = 2) -> Path:
    """A random model of v1.1 (`gated`, as Flan-T5; its output layer has weights of its own), or of v1.0."""
    tokenizer(text).save(str(_made(directory) / "tokenizer.json"))
    settings = {"tokenizer_class": "T5Tokenizer", "pad_token": PAD, "eos_token": EOS, "unk_token": UNK, "extra_ids": 0}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    torch.manual_seed(0)
    save_model(directory, config(gated=gated, num_layers=layers))
    return directory


def config(*, gated: bool = True, **changes: Any) -> T5Config:
    version = {"feed_forward_proj": "gated-gelu" if gated else "relu", "tie_word_embeddings": not gated}
    sizes = {"vocab_size": 128, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    return T5Config(**sizes | version | {"dropout_rate": 0.0, "decoder_start_token_id": 0} | changes)


def save_model(directory: Path, config: T5Config) -> None:
    """Random weights."""
    model = T5ForConditionalGeneration(config)
    if not config.scale_decoder_outputs:
        model.lm_head.weight = torch.nn.Parameter(0.1 * torch.randn_like(model.lm_head.weight))
    model.save_pretrained(directory)
    # transformers 5 always writes true, and a key of its own; the published files have this
    published = json.loads((directory / "config.json").read_text())
    published["tie_word_embeddings"] = published.pop("scale_decoder_outputs", True)
    (directory / "config.json").write_text(json.dumps(published))


def tokenizer(text: list[str]) -> Tokenizer:
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=[PAD, EOS, UNK], unk_token=UNK, show_progress=False
    )
    made.train_from_iterator(text, trainer)
    made.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", special_tokens=[(EOS, made.token_to_id(EOS))]
    )
    return made


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory
