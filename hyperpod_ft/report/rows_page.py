"""The page about rows as they would be trained: one HTML text that loads nothing from elsewhere."""

from collections.abc import Sequence
from pathlib import Path

from hyperpod_ft import publish
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.data.inspection.examples import ShownRow
from hyperpod_ft.report.html import asset, content_policy, environment

_ASSETS = ("report.css",)


def rows_page(config: RunConfig, source: str, rows: Sequence[ShownRow]) -> str:
    assets = {name: asset(name) for name in _ASSETS}
    return (
        environment()
        .get_template("report/rows.html.j2")
        .render(
            dataset=source,
            model=config.model.asset.short_name,
            rows=rows,
            examples=[example for row in rows for example in row.examples],
            assets=assets,
            policy=content_policy(assets, connects=False),
        )
    )


def write_rows_page(config: RunConfig, source: str, rows: Sequence[ShownRow], path: Path) -> None:
    """Write the page; the file appears whole. Raises OSError when it cannot be written."""
    publish.write_text(path, rows_page(config, source, rows))
