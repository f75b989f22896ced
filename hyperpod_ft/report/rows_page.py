"""The page about rows as they would be trained: one HTML text that loads nothing from elsewhere."""

from collections.abc import Sequence
from pathlib import Path

from hyperpod_ft import publish
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.data.inspection.examples import ShownRow
from hyperpod_ft.report.html import page


def write_rows_page(config: RunConfig, source: str, rows: Sequence[ShownRow], path: Path) -> None:
    """Write the page; the file appears whole. Raises OSError when it cannot be written."""
    text = page(
        "rows",
        ("report.css",),
        connects=False,
        dataset=source,
        model=config.model.asset.short_name,
        rows=rows,
        examples=[example for row in rows for example in row.examples],
    )
    publish.write_text(path, text)
