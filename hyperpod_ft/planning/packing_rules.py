"""Which families of models keep packed documents apart when engine torch trains them.

The engine passes no attention mask: transformers derives one from `position_ids` that restart with each document
(transformers 4.57.6, masking_utils.py, find_packed_sequence_indices). Families whose attention does not come from that
module ignore the restarts, so that a document attends to those before it in its row, without any error.
tests/unit/planning/test_packing_rules.py compares packed documents with the same ones alone, for every family here.
"""

from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.errors import UserError

# values of model_type in config.json
SEPARATING_FAMILIES = frozenset(
    {
        "cohere",
        "cohere2",
        "exaone4",
        "gemma",
        "gemma2",
        "gemma3_text",
        "glm",
        "glm4",
        "gpt2",
        "gpt_neox",
        "granite",
        "helium",
        "llama",
        "ministral",
        "mistral",
        "mixtral",
        "olmo",
        "olmo2",
        "olmo3",
        "phi",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "seed_oss",
        "smollm3",
        "starcoder2",
    }
)


def check_packing(config: RunConfig, family: str) -> None:
    """Refuse packing for a family that is not known to separate documents. `family` is config.json's model_type."""
    if config.dataset.packing != "none" and family not in SEPARATING_FAMILIES:
        raise UserError(
            f"model.source: engine torch is not known to separate packed documents in models of type"
            f" {family or '(none)'}",
            "set dataset.packing: none",
        )
