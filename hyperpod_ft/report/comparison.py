"""The page about several runs: what differs between them, and what its headings say."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from hyperpod_ft.report.numbers import duration, number
from hyperpod_ft.report.run_report import RunReport


def differences(run_files: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Each key whose value is not the same in all run files, with its value in each. They are given by key."""
    keys = dict.fromkeys(key for settings in run_files for key in settings)
    found = []
    for key in keys:
        values = [_text(settings.get(key)) for settings in run_files]
        if len(set(values)) > 1:
            found.append((key, values))
    return found


def _text(value: Any) -> str:
    if value is None:
        return "not set"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def title(reports: Sequence[RunReport]) -> str:
    """Of a page about several runs."""
    methods_compared = {report.settings["training.method"] for report in reports}
    if methods_compared == {"lora", "full"}:
        return "LoRA and full fine-tuning compared"
    return " and ".join(report.name for report in reports) if len(reports) == 2 else f"{len(reports)} runs compared"


def methods(reports: Sequence[RunReport]) -> str:
    """Full fine-tuning against LoRA, if the runs are one of each; else which run has the lowest validation loss."""
    trained = [report.training_summary for report in reports if report.training_summary]
    by_method = {summary.method: summary for summary in trained}
    if len(reports) == len(trained) == 2 and set(by_method) == {"lora", "full"}:
        lora, full = by_method["lora"], by_method["full"]
        parts = []
        if lora.rows_per_second and full.rows_per_second:
            ratio = lora.rows_per_second / full.rows_per_second
            parts.append(f"trained {ratio:.2f} times as many rows a second as full fine-tuning")
        if lora.seconds and full.seconds:
            parts.append(f"took {duration(lora.seconds)} instead of {duration(full.seconds)}")
        if lora.cost is not None and full.cost is not None:
            parts.append(f"cost {lora.cost:,.2f} instead of {full.cost:,.2f}")
        if lora.validation_loss is not None and full.validation_loss is not None:
            parts.append(f"ended at validation loss {number(lora.validation_loss)}, not {number(full.validation_loss)}")
        if parts:
            return f"LoRA {', '.join(parts[:-1])}{', and ' if parts[1:] else ''}{parts[-1]}."
    losses = [
        (summary.validation_loss, summary.run)
        for summary in trained
        if summary.validation_loss is not None and math.isfinite(summary.validation_loss)
    ]
    if not losses:
        return f"{len(reports)} runs, none with a validation loss yet."
    value, name = min(losses)
    return f"{name} has the lowest final validation loss of {len(losses)} trained runs: {number(value)}."


def of_chart(chart: Mapping[str, Any]) -> str:
    """What a chart of several runs shows: which of them ends with the lowest loss, or was fastest."""
    if chart["name"] == "tokens_per_second":
        value, name = max((statistics.median(series["y"]), series["label"]) for series in chart["series"])
        return f"{name} is fastest, at a median of {value:,.0f} tokens/s"
    label = {"loss": "training loss", "validation_loss": "validation loss"}[chart["name"]]
    value, name = min((series["y"][-1], series["label"]) for series in chart["series"])
    return f"{name} ends with the lowest {label}, {number(value)}"
