"""Names of parameters in a live PEFT model, and in the files that PEFT saves.

The names in a live model include the adapter: `...q_proj.lora_A.default.weight`,
`...norm.modules_to_save.default.weight`, `...embed_tokens.lora_embedding_A.default`; files omit the adapter's name
(PEFT 0.17, utils/save_and_load.py, `get_peft_model_state_dict`).
"""

import re

_LIVE = re.compile(
    r"(?P<module>.+?)\.(?:(?P<factor>lora_\w+)\.(?P<adapter>[^.]+)|modules_to_save\.(?P<saver>[^.]+)|original_module)"
    r"(?P<parameter>(?:\.[^.]+)*)"
)


def saved_name(live: str, adapter: str) -> str | None:
    """The name of a live parameter in the adapter's files; None if it belongs to another adapter."""
    match = _LIVE.fullmatch(live)
    if match is None:
        return live
    if adapter not in (match["adapter"], match["saver"]):
        return None
    middle = f".{match['factor']}" if match["factor"] else ""
    return f"{match['module']}{middle}{match['parameter']}"


def original_name(live: str) -> str:
    """The base's parameter that a live parameter of `modules_to_save` is a copy of; other names as they are."""
    match = _LIVE.fullmatch(live)
    if match is None or match["saver"] is None:
        return live
    return f"{match['module']}.original_module{match['parameter']}"


def is_trained(live: str) -> bool:
    """Whether a live parameter belongs to an adapter, whose files must have it."""
    match = _LIVE.fullmatch(live)
    return match is not None and bool(match["adapter"] or match["saver"])


def is_frozen_base(name: str) -> bool:
    """Whether a saved name is that of a base weight under LoRA.

    PEFT saves the base's embedding along with an embedding's factors (`save_embedding_layers`). It was not trained, so
    the merge takes it from the base model. A base bias under LoRA is saved only if it was trained (`bias`).
    """
    return name.endswith(".base_layer.weight")
