"""What differs between the run files of several runs."""

import json
from collections.abc import Sequence
from typing import Any

from hyperpod_ft.report.run_report import RunReport


def differences(reports: Sequence[RunReport]) -> list[tuple[str, list[str]]]:
    """Each key whose value is not the same in all run files, with its value in each."""
    keys = dict.fromkeys(key for report in reports for key in report.settings)
    found = []
    for key in keys:
        values = [_text(report.settings.get(key)) for report in reports]
        if len(set(values)) > 1:
            found.append((key, values))
    return found


def _text(value: Any) -> str:
    if value is None:
        return "not set"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
