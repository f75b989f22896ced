"""`hyperpod-ft first-day`."""

import secrets
from pathlib import Path
from typing import Annotated

import typer

from hyperpod_ft.cli.options import Yes, require_yes
from hyperpod_ft.cli.output import tables

app = typer.Typer()


@app.command("first-day")
def first_day(
    steps: Annotated[
        list[str] | None, typer.Argument(metavar="STEP", help="What to try. Without one, print all, with prices.")
    ] = None,
    spend_at_most: Annotated[
        float | None, typer.Option("--spend-at-most", metavar="USD", min=0, help="Refuse steps that may cost more.")
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE", help="Where to write what AWS answered, without secrets."),
    ] = None,
    yes: Yes = False,
) -> None:
    """Try the kit in your AWS account, step by step (docs/first-day.md).

    Exit code 1 if a step fails, or if something could not be deleted.
    """
    from hyperpod_ft.first_day import plan

    wanted = plan.chosen(steps or [step.name for step in plan.STEPS])
    table = tables.table("step", "shows", "on", "USD at most")
    for step in wanted:
        table.add_row(step.name, step.shows, f"ml.{step.instance_type}", f"{plan.at_most(step):.2f}")
    tables.console().print(table)
    if not steps:
        print(f"Nothing was created; {plan.PRICES_OF}. To try one: hyperpod-ft first-day {wanted[0].name}")
        return
    total = plan.require_affordable(wanted, spend_at_most)
    require_yes(f"Create these in {plan.REGION}, for at most ${total:.2f} ({plan.PRICES_OF})?", yes)

    from hyperpod_ft.first_day import day

    directory = Path(f"first-day-{secrets.token_hex(4)}").absolute()
    done = day.run(wanted, directory, report or directory / "report.txt", tables.progress)
    raise typer.Exit(1 if done.failed else 0)
