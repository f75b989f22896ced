"""The families of models whose attention engine torch computes itself, so that packed documents stay apart.

transformers lets a program replace the attention of most families (AttentionInterface). The families listed here pass
it everything that their attention depends on, such as the size of a sliding window; GPT-J's is replaced in its class
(model/gptj.py). Other families keep transformers' own attention: some express part of it in the mask alone, some
also mix tokens in convolutions or recurrences, and the attention of some cannot be replaced.

tests/unit/planning/torch/test_packing_rules.py compares losses and gradients of packed documents with those of the same
documents alone, for every family here.
"""

from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.errors import UserError

# values of model_type in config.json
SEPARATING_FAMILIES = frozenset(
    {
        "apertus",
        "arcee",
        "bitnet",
        "cohere",
        "cohere2",
        "cwm",
        "ernie4_5",
        "exaone4",
        "flex_olmo",
        "gemma",
        "gemma2",
        "gemma3_text",
        "glm",
        "glm4",
        "glm4_moe",
        "gpt2",
        "gpt_bigcode",
        "gpt_neox",
        "gptj",
        "granite",
        "granitemoe",
        "granitemoeshared",
        "helium",
        "hunyuan_v1_dense",
        "llama",
        "ministral",
        "ministral3",
        "mistral",
        "mixtral",
        "nanochat",
        "nemotron",
        "olmo",
        "olmo2",
        "olmo3",
        "olmoe",
        "persimmon",
        "phi",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "seed_oss",
        "smollm3",
        "stablelm",
        "starcoder2",
        "vaultgemma",
    }
)


def check_packing(config: RunConfig, family: str) -> None:
    """Refuse packing for a family that is not known to separate documents. `family` is config.json's model_type."""
    if family in SEPARATING_FAMILIES:
        return
    if config.dataset.format == "preference":
        raise UserError(
            f"training.objective: dpo has both completions of a pair in one row, and engine torch is not known to"
            f" separate them in models of type {family or '(none)'}",
            "choose a model of another family",
        )
    if config.dataset.packing != "none":
        raise UserError(
            f"model.source: engine torch is not known to separate packed documents in models of type"
            f" {family or '(none)'}",
            "set dataset.packing: none",
        )
