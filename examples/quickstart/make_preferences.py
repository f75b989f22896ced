"""Make preferences.jsonl and feedback.jsonl from requests.jsonl: of two answers alike, the long form is preferred.

    python examples/quickstart/make_preferences.py

`--nodes=4 --time=02:00:00` is chosen, `-N 4 -t 02:00:00` rejected: who reads a script later need not know the letters.
"""

import json

from make_data import HERE, read_rows

ROWS = 240
SHORT = {"--nodes=": "-N ", "--time=": "-t ", "--partition=": "-p ", "--job-name=": "-J "}  # --mail-type has none


def short(flags: str) -> str:
    """The same flags in their short form.

    >>> short("--nodes=4 --mail-type=END")
    '-N 4 --mail-type=END'
    """
    for long_form, letter in SHORT.items():
        flags = flags.replace(long_form, letter)
    return flags


def preference(row: dict[str, str]) -> dict[str, str]:
    """The pair made of a row, with the prompt of the quickstart recipe."""
    return {"prompt": row["request"] + "\n", "chosen": row["flags"], "rejected": short(row["flags"])}


def preferences() -> list[dict[str, str]]:
    """Pairs of the first rows that the quickstart trains on, without those that have no short form."""
    seen = [row for row in read_rows() if "unseen" not in row and short(row["flags"]) != row["flags"]]
    return [preference(row) for row in seen[:ROWS]]


def feedback() -> list[dict[str, object]]:
    """Of each pair one answer, with the label of its form: every second one is short."""
    return [
        {"prompt": pair["prompt"], "completion": pair["rejected" if number % 2 else "chosen"], "label": number % 2 == 0}
        for number, pair in enumerate(preferences())
    ]


def main() -> None:
    """Write both files."""
    for name, rows in (("preferences", preferences()), ("feedback", feedback())):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (HERE / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
