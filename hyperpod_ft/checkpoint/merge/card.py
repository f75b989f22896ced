"""The model card of a merge outside a run, which names base and adapters. For a run: stages/model_card.py."""

from collections.abc import Sequence
from pathlib import Path

import yaml

from hyperpod_ft import __version__


def merge_card(base: Path, adapters: Sequence[tuple[Path, float]]) -> str:
    """README.md, with the header for the Hub; `adapters`: directories with their weights."""
    name = base.resolve().name
    header = {"base_model": name, "library_name": "transformers", "tags": ["hyperpod-ft", "lora", "merge"]}
    rows = [("base model", name)]
    rows += [("LoRA adapter", f"{directory.resolve().name}, weight {weight:g}") for directory, weight in adapters]
    rows += [("made by", f"hyperpod-ft {__version__}")]
    table = "\n".join(f"| {key} | {value.replace('|', chr(92) + '|')} |" for key, value in rows)
    return (
        f"---\n{yaml.safe_dump(header, sort_keys=False, allow_unicode=True)}---\n\n# {name}, merged\n\n"
        f"LoRA adapters merged into their base model.\n\n| | |\n|---|---|\n{table}\n"
    )
