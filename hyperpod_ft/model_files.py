"""Which files of a Hugging Face model belong to it besides its weights."""

TOKENIZER = (
    "tokenizer*.json",
    "tokenizer.model*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.tiktoken",
    "spiece.model",
    "sentencepiece*.model",
    "chat_template.*",
    "additional_chat_templates/*.jinja",
)
# Configuration, tokenizer, chat template, licence. Not code (`*.py`): the kit never runs a model's own.
BESIDE_WEIGHTS = (
    "config.json",
    "generation_config.json",
    *TOKENIZER,
    "LICENSE*",
    "LICENCE*",
    "NOTICE*",
    "USE_POLICY*",
)
