"""Asks an OpenAI-compatible server which model it serves: the tuned one, or its base.

At some positions of a text, the most likely next tokens of the two models differ, as computed here from their files.
The server is given the text up to each of these, and its greedy next token tells which model it has. That takes no
log-probabilities, which not every server gives.
"""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from hyperpod_ft.checkpoint.formats import model_directory
from hyperpod_ft.checkpoint.verify import logits
from hyperpod_ft.errors import UserError, first_sentence

_TEXT = """Question: A train leaves the station at nine in the morning and travels 120 kilometers in two hours.
How fast is it? Answer: The train travels 60 kilometers per hour, since 120 divided by 2 is 60.
Question: Write a function in Python that returns the largest number of a list.
Answer: def largest(numbers): return max(numbers)
Question: Which of these is a mammal: a shark, a whale or a penguin? Explain why. Answer: A whale is one, because"""
_TOKENS = 192
_ASKED = 16
# Most of the answers must agree; a server computes in another dtype, in which the closest ones may change.
_MAJORITY = 0.75
_SECONDS = 120.0
_KEY = "HYPERPOD_FT_API_KEY"


@dataclass(frozen=True)
class Served:
    """How many of the server's next tokens, of `asked`, are those of the tuned model and of its base."""

    url: str
    model: str
    asked: int
    tuned: int
    base: int

    @property
    def findings(self) -> tuple[str, ...]:
        """One line unless most tokens are the tuned model's."""
        where = f"{self.url}: {self.model}"
        if not self.asked:
            return (f"{where}: cannot be told from the base: both have the same most likely tokens",)
        if self.tuned >= _MAJORITY * self.asked:
            return ()
        what = "is the base model" if self.base >= _MAJORITY * self.asked else "is neither the tuned model nor its base"
        return (f"{where} {what}: {self.base} of {self.asked} tokens are the base's, {self.tuned} the tuned model's",)


def ask(directory: Path, base: Path, url: str, model: str | None, *, is_adapter: bool) -> Served:
    """Compares what the server at `url` answers with the tuned model in `directory`, or the adapter, and its base.

    `model`: the name by which the server knows it; None: the first that it lists. The environment's HYPERPOD_FT_API_KEY
    is sent, if it is set. Raises UserError when a model cannot be computed or the server does not answer.
    """
    url = _root(url)
    name = model or _first(url)
    tokenizer = _tokenizer(base if is_adapter and not any(directory.glob("tokenizer*.json")) else directory)
    tokens = torch.tensor([tokenizer(_TEXT).input_ids[:_TOKENS]])
    tuned = logits.of_adapter(directory, base, tokens) if is_adapter else logits.of_model(directory, tokens)
    asked = list(_telling(tuned, logits.of_model(base, tokens), tokenizer))
    counts = {"tuned": 0, "base": 0}
    for position, mine, theirs in asked:
        prompt = tokens[0, : position + 1].tolist()
        answer = _post(url, {"model": name, "prompt": prompt, "max_tokens": 1, "temperature": 0})
        counts["tuned"] += answer == mine
        counts["base"] += answer == theirs
    return Served(url, name, len(asked), **counts)


def _telling(tuned: torch.Tensor, base: torch.Tensor, tokenizer: Any) -> Iterator[tuple[int, str, str]]:
    """Positions, with the next texts of both models, at which these differ most clearly."""
    size = min(tuned.shape[1], base.shape[1])
    mine, theirs = tuned[:, :size].argmax(-1), base[:, :size].argmax(-1)
    here = torch.arange(len(mine))
    clear = torch.minimum(tuned[here, mine] - tuned[here, theirs], base[here, theirs] - base[here, mine])
    found = 0
    for position in clear.argsort(descending=True).tolist():
        texts = [tokenizer.decode([int(ids[position])], skip_special_tokens=True).strip() for ids in (mine, theirs)]
        if clear[position] > 0 and all(texts) and len(set(texts)) == 2 and not any("\ufffd" in text for text in texts):
            yield position, texts[0], texts[1]
            found += 1
        if found == _ASKED:
            return


def _tokenizer(directory: Path) -> Any:
    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (ImportError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{directory}: its tokenizer cannot be loaded: {first_sentence(error)}",
            f"save the tokenizer beside {model_directory.CONFIG}",
        ) from error


def _root(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise UserError(f"--served {url}: is not a URL", "give one such as http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1")


def _first(url: str) -> str:
    listed = _request(f"{url}/v1/models", None).get("data") or []
    if not listed:
        raise UserError(f"--served {url}: lists no models", "give --model")
    return str(listed[0].get("id"))


def _post(url: str, body: dict[str, Any]) -> str:
    """The text of one completion, without the spaces around it."""
    choices = _request(f"{url}/v1/completions", body).get("choices") or [{}]
    return str(choices[0].get("text", "")).strip()


def _request(url: str, body: dict[str, Any] | None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    try:
        # `_root` refuses other schemes
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310
        if key := os.environ.get(_KEY):
            request.add_unredirected_header("Authorization", f"Bearer {key}")
        with urllib.request.urlopen(request, timeout=_SECONDS) as reply:  # noqa: S310
            value = json.loads(reply.read())
    except urllib.error.HTTPError as error:
        said = error.read(300).decode(errors="replace").replace("\n", " ")
        raise UserError(f"--served {url}: answered {error.code}: {said}", f"check --model, and {_KEY}") from error
    except (OSError, ValueError) as error:
        raise UserError(f"--served {url}: does not answer: {first_sentence(error)}", "check the address") from error
    if not isinstance(value, dict):
        raise UserError(f"--served {url}: its answer is not a JSON object", "check the address")
    return value
