"""What the first day adds to the kit: its command."""

from collections.abc import Sequence

from hyperpod_ft.annexes import Annex, Commands


class FirstDayAnnex(Annex):
    def commands(self) -> Sequence[Commands]:
        from hyperpod_ft.first_day.cli import app

        return [Commands(app)]


ANNEX = FirstDayAnnex()
