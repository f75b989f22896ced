"""Make requests.jsonl: requests in plain words, each with the sbatch flags that it asks for.

    python examples/quickstart/make_data.py

`Four nodes for two hours on trn1, mail me at the end` is `--nodes=4 --time=02:00:00 --partition=trn1 --mail-type=END`:
one to four of five flags, always in one order. Rows with the field `unseen` have what no other row has, and what the
base model never read either:

- `pair`: two values together, such as four nodes and two hours, that are together in no other row;
- `phrasing`: a beginning, and a wording of one flag or more, that are in no other row.

Each job name is made up, and in one row only. The rows with `unseen` are where the kit's drawing finds the validation
rows of the quickstart recipe: it trains on none of them.
"""

import argparse
import json
import random
import re
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from hyperpod_ft.data.mixing.mixture import Examples, draw

HERE = Path(__file__).resolve().parent
ROWS, UNSEEN_ROWS = 1280, 64  # UNSEEN_ROWS: of both kinds together, a twentieth
RUN_SEED = 42  # the recipe's `seed`, which draws its validation rows
HELD_OUT_SHARE = 0.1  # of the pairs of values

_WORDS = {1: "one", 2: "two", 3: "three", 4: "four", 5: "five", 6: "six", 8: "eight", 10: "ten", 12: "twelve"}
_WORDS |= {15: "fifteen", 16: "sixteen", 20: "twenty", 24: "twenty-four", 30: "thirty", 32: "thirty-two"}
_WORDS |= {45: "forty-five"}
# No number of nodes is also one of hours or minutes: so small a model mixes up which of two numbers is which.
_NODES = (1, 3, 4, 8, 16, 32)
_MINUTES = (15, 20, 30, 45)
_HOURS = (2, 5, 6, 10, 12, 24)
_SYLLABLES = re.findall("..", "babebodadedofafigokakikolalilomamimonanenopararirosasotatitovavoza")

# The values of each flag, and their words in the order of the values; any name is a value.
VALUES = {
    "nodes": [str(count) for count in _NODES],
    "time": [*(f"00:{count}:00" for count in _MINUTES), *(f"{count:02}:00:00" for count in _HOURS)],
    "partition": ["p4d", "p5", "trn1", "trn2", "g5", "g6", "cpu", "gpu", "dev", "debug", "large", "spot"],
    "mail-type": ["BEGIN", "END", "FAIL", "ALL"],
}
FLAGS = ("nodes", "time", "partition", "job-name", "mail-type")

# What a request begins with, and how it asks for a flag: seen wordings, then those that only rows with `phrasing` have.
_BEGINNINGS = (
    ["run it", "start it", "submit this", "launch it", "please run it", "I need it", "run my script", ""],
    ["I want this", "queue this up", "please start my script"],
)
_PHRASES = {
    "nodes": (["on {}", "with {}", "using {}", "across {}"], ["over {}", "taking {}"]),
    "time": (
        ["for {}", "for at most {}", "with a limit of {}", "within {}", "for no longer than {}"],
        ["for up to {}", "limited to {}"],
    ),
    "partition": (
        ["on {}", "in partition {}", "on the {} partition", "in the {} queue", "on partition {}"],
        ["through the {} queue", "using partition {}"],
    ),
}
_MAIL = {
    "BEGIN": ("at the start", "when it starts", "once it starts"),
    "END": ("at the end", "when it ends", "once it ends"),
    "FAIL": ("on failure", "if it fails", "once it fails"),
    "ALL": ("about everything", "on everything", "for everything"),
}
# Likewise; they follow a comma, or `and`.
_SENTENCES = {
    "job-name": (
        ['call it "{}"', 'name it "{}"', 'its name is "{}"', 'use the name "{}"'],
        ['give it the name "{}"', 'it is called "{}"'],
    ),
    **{
        event: (
            [f"mail me {first}", f"email me {second}", f"send me mail {third}"],
            [f"let me know by mail {first}", f"I want a mail {first}"],
        )
        for event, (first, second, third) in _MAIL.items()
    },
}


def held_out_words() -> set[str]:
    """The words that only held-out wordings have."""
    wordings = [_BEGINNINGS, *_PHRASES.values(), *_SENTENCES.values()]
    seen, new = (set(" ".join(text for choices in wordings for text in choices[kind]).split()) for kind in (0, 1))
    return new - seen


@dataclass(frozen=True)
class Request:
    """A request as its user writes it; `flags` maps a flag to its value, in the order of FLAGS."""

    text: str
    flags: dict[str, str]

    @property
    def answer(self) -> str:
        return " ".join(f"--{flag}={value}" for flag, value in self.flags.items())


def in_words(flag: str, value: str, digits: bool = False) -> str:
    """A value as a request says it.

    >>> in_words("time", "02:00:00"), in_words("nodes", "4", digits=True)
    ('two hours', '4 nodes')
    """
    if flag == "nodes":
        count, unit = int(value), "node"
    elif flag == "time":
        hours, minutes, _ = map(int, value.split(":"))
        count, unit = (hours, "hour") if hours else (minutes, "minute")
    else:
        return value
    return f"{count if digits else _WORDS[count]} {unit}{'s' * (count > 1)}"


class Grammar:
    """Draws requests. Which pairs of values are held out is the same for every seed."""

    def __init__(self, seed: int) -> None:
        self.order = random.Random(seed)  # noqa: S311 - not a secret
        fixed = random.Random("pairs")  # noqa: S311
        pairs = [
            ((one, value), (other, second))
            for one, other in combinations(VALUES, 2)
            for value in VALUES[one]
            for second in VALUES[other]
        ]
        self.held_out_pairs = frozenset(fixed.sample(pairs, round(len(pairs) * HELD_OUT_SHARE)))

    def request(self, unseen: str = "") -> Request:
        """A request with nothing held out, or with what `unseen` names: `pair` or `phrasing`."""
        while True:
            flags = self._flags()
            if bool(self.held_out_pairs.intersection(combinations(flags.items(), 2))) == (unseen == "pair"):
                return Request(self._text(flags, new=unseen == "phrasing"), flags)

    def name(self) -> str:
        """A made-up job name: two syllables, and at times a digit."""
        digit = self.order.choice(("", str(self.order.randrange(10))))
        return "".join(self.order.choices(_SYLLABLES, k=2)) + digit

    def _flags(self) -> dict[str, str]:
        (count,) = self.order.choices((1, 2, 3, 4), (1, 3, 4, 3))
        chosen = self.order.sample(FLAGS, count)
        draws = {flag: self.order.choice(VALUES[flag]) if flag in VALUES else self.name() for flag in chosen}
        return {flag: draws[flag] for flag in FLAGS if flag in draws}

    def _text(self, flags: dict[str, str], new: bool) -> str:
        """`new`: with a held-out beginning, and one held-out wording of a flag at least."""
        renewed = self.order.sample(list(flags), self.order.randint(1, len(flags))) if new else []
        beginning = self.order.choice(_BEGINNINGS[new])
        phrases = [self._wording(_PHRASES[flag], flag, flag in renewed, flags) for flag in flags if flag in _PHRASES]
        self.order.shuffle(phrases)
        if not beginning and "nodes" in flags:  # `Four nodes for two hours`
            phrases = [in_words("nodes", flags["nodes"], self._digits()), *(p for p in phrases if " node" not in p)]
        sentences = [
            self._wording(_SENTENCES[flags[flag] if flag == "mail-type" else flag], flag, flag in renewed, flags)
            for flag in flags
            if flag not in _PHRASES
        ]
        self.order.shuffle(sentences)
        text = " ".join([beginning, *phrases]).strip()
        for sentence in sentences:
            text += self.order.choice((", ", " and ")) + sentence if text else sentence
        return text[0].upper() + text[1:]

    def _wording(self, choices: tuple[list[str], ...], flag: str, new: bool, flags: dict[str, str]) -> str:
        return self.order.choice(choices[new]).format(in_words(flag, flags[flag], self._digits()))

    def _digits(self) -> bool:
        return self.order.random() < 0.5


def rows(seed: int, run_seed: int = RUN_SEED) -> list[dict[str, str]]:
    """All rows: different requests, the unseen ones where a run with `run_seed` draws its validation rows."""
    grammar = Grammar(seed)
    (held_out,) = draw([Examples.of_rows(ROWS)], UNSEEN_ROWS / ROWS, run_seed).validation
    validation = sorted(held_out.tolist())
    kinds = {row: ("pair", "phrasing")[number % 2] for number, row in enumerate(validation)}
    made: list[dict[str, str]] = []
    texts: set[str] = set()
    names: set[str] = set()
    while len(made) < ROWS:
        kind = kinds.get(len(made), "")
        request = grammar.request(kind)
        name = request.flags.get("job-name")
        if request.text in texts or name in names:
            continue
        texts.add(request.text)
        names.update([name] if name else [])
        made.append({"request": request.text, "flags": request.answer} | ({"unseen": kind} if kind else {}))
    return made


def read_rows() -> list[dict[str, str]]:
    """The rows of requests.jsonl."""
    return [json.loads(line) for line in (HERE / "requests.jsonl").read_text(encoding="utf-8").splitlines()]


def main() -> None:
    """Write requests.jsonl."""
    parser = argparse.ArgumentParser(description="Make the quickstart's rows.")
    parser.add_argument("--output", type=Path, default=HERE / "requests.jsonl")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--run-seed", type=int, default=RUN_SEED)
    arguments = parser.parse_args()
    text = "".join(json.dumps(row) + "\n" for row in rows(arguments.seed, arguments.run_seed))
    arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
