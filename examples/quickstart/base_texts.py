"""What the quickstart's base model reads; make_model.py trains it.

Requests and their parts in words, flags and the same parts, how Slurm writes a value, names to copy, the prose of
`facts.txt` and `qa.jsonl`, and text without sense. Never flags as the answer to a request, nor what make_data.py holds
out: pairs of values, phrasings, and the job names of its rows.
"""

import json
import re
import string
from pathlib import Path

from make_data import VALUES, Grammar, Request, held_out_words, in_words, read_rows

HERE = Path(__file__).resolve().parent
# Documents of a step, by kind; see `Texts`.
SHARES = {"parts": 40, "meaning": 7, "writing": 6, "copy": 6, "prose": 3, "noise": 2}
ALPHABETS = [
    string.ascii_lowercase,
    string.ascii_letters,
    string.digits,
    string.ascii_letters + string.digits + string.punctuation,
    string.ascii_lowercase + "äöüßàâçéèêëîïôûñóúáíåøæ",
    "".join(map(chr, range(0x0391, 0x03CA))),  # Greek
    "".join(map(chr, range(0x0410, 0x0450))),  # Cyrillic
    "".join(map(chr, range(0x4E00, 0x9FA6))),  # Chinese
]
# Words of requests that carry no part of them, and words that do.
FILLERS = frozenset(
    """on with using across for at most a limit of within no longer than in the run it submit this launch please i need
    my script call name its is use me send once when about if""".split()  # noqa: SIM905
)
TELLING = re.compile(r"node|hour|minute|start|end|fail|everything|e?mail|partition|queue")
SEPARATORS = [" "] * 12 + [", ", ". ", "\n"]


def parts(request: Request) -> str:
    """The parts of a request in words, in the order of its flags."""
    return ", ".join(f"{_heading(flag)} {_in_words(flag, value)}" for flag, value in request.flags.items())


def _heading(flag: str) -> str:
    return {"mail-type": "mail", "job-name": "name"}.get(flag, flag)


def _in_words(flag: str, value: str) -> str:
    if flag == "nodes":
        return in_words(flag, value).split()[0]
    return f'"{value}"' if flag == "job-name" else in_words(flag, value).lower()


class Texts:
    """Draws what the model reads. A document's first line is its prompt; prose and noise have none."""

    def __init__(self, seed: int) -> None:
        self.grammar = Grammar(seed)
        self.order = self.grammar.order
        lines = (HERE / "facts.txt").read_text(encoding="utf-8").splitlines()
        questions = map(json.loads, (HERE / "qa.jsonl").read_text(encoding="utf-8").splitlines())
        self.statements = [line for line in lines if line and not line.startswith("#")]
        self.statements += [row["context"] for row in questions if row["context"]]
        words = set(re.findall(r"\b[a-z]{2,7}\b", " ".join(self.statements))) - held_out_words()
        values = {word for flag, values in VALUES.items() for value in values for word in in_words(flag, value).split()}
        self._prose_words = sorted(word for word in words - values if not TELLING.match(word))
        self._taken = {name for row in read_rows() if (name := row["flags"].partition("--job-name=")[2].split(" ")[0])}

    def documents(self) -> list[tuple[str, str]]:
        """Prompts and answers of one step."""
        return [getattr(self, kind)() for kind, count in SHARES.items() for _ in range(count)]

    def request(self) -> Request:
        """A request with nothing that make_data.py holds out."""
        while (request := self.grammar.request()).flags.get("job-name") in self._taken:
            pass
        return request

    def parts(self) -> tuple[str, str]:
        """A request and its parts. Six of ten requests are reworded: from these the model learns what matters."""
        request = self.request()
        return self._reworded(request.text) if self.order.random() < 0.6 else request.text, parts(request)

    def _reworded(self, text: str) -> str:
        """Some of the words that carry no part of the request become others, or none."""
        share = self.order.choice((0.2, 0.5, 0.8))
        words = [
            " ".join(self._any_word() for _ in range(self.order.randint(0, 2)))
            if word.lower() in FILLERS and self.order.random() < share
            else word
            for word in text.split()
        ]
        made = " ".join(filter(None, words))
        return made[0].upper() + made[1:]

    def _any_word(self) -> str:
        """One of the prose, or made-up letters."""
        if self.order.random() < 0.8:
            return self.order.choice(self._prose_words)
        return "".join(self.order.choices(string.ascii_lowercase, k=self.order.randint(2, 6)))

    def meaning(self) -> tuple[str, str]:
        request = self.request()
        return request.answer, parts(request)

    def writing(self) -> tuple[str, str]:
        """How Slurm writes values: `write time two hours, mail end` is `02:00:00, END`."""
        request = self.request()
        return f"write {parts(request)}", ", ".join(request.flags.values())

    def copy(self) -> tuple[str, str]:
        """Made-up names, and the same again."""
        names = [name for name in (self.grammar.name() for _ in range(4)) if name not in self._taken]
        return ", ".join(f'"{name}"' for name in names), ", ".join(names)

    def prose(self) -> tuple[str, str]:
        return "", self.order.choice(self.statements)

    def noise(self, words: int = 12) -> tuple[str, str]:
        """Words of random letters of one alphabet."""
        alphabet = self.order.choice(ALPHABETS)
        made = ["".join(self.order.choices(alphabet, k=self.order.randint(1, 9))) for _ in range(words)]
        return "", "".join(word + self.order.choice(SEPARATORS) for word in made)
