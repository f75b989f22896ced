"""What looks like a secret, and texts without secrets."""

import re
from collections.abc import Mapping
from typing import NamedTuple

# In texts, and of variables whose values must not be in them: everything that may be a secret.
_NAME = re.compile(r"TOKEN(?!IZERS)|SECRET|PASS(WORD|WD|PHRASE)|CREDENTIAL|AUTH|KEY", re.IGNORECASE)
_VALUE = re.compile(r"://[^/\s]*@|\b(hf_|ghp_|github_pat_|sk-|AKIA|ASIA)[A-Za-z0-9_-]{8,}")
# Of a variable that jobs use, which is ordinary if in doubt: a job without it may fail, or run something else.
_OWN_NAME = re.compile(
    r"TOKEN(?=_|$)|SECRET|PASS(WORD|WD|PHRASE)|CREDENTIAL|(?<![A-Z])(AUTH|(API|ACCESS|PRIVATE)?KEYS?)(?=_|$)",
    re.IGNORECASE,
)
_PLACE = re.compile(r"(PATH|FILE|DIR|DIRECTORY|HOME|ROOT|SOCK)$", re.IGNORECASE)
_WORD = re.compile(
    r"\S*://[^/\s]*@\S*|(hf_|ghp_)[A-Za-z0-9]{16,}|(github_pat_|sk-)[A-Za-z0-9_-]{16,}|(AKIA|ASIA)[A-Z0-9]{16}"
)
_SHORTEST = 6  # characters: a shorter value of a variable is also found in words that are no secret


def holds_secret(text: str) -> bool:
    """Whether a text appears to contain a password or a token."""
    return bool(_VALUE.search(text))


def is_secret(name: str, value: str) -> bool:
    """Whether a variable is a secret: by its name, unless that is one of a place, or by a whole word of its value."""
    named = _OWN_NAME.search(name) and not _PLACE.search(name)
    return bool(named or any(map(_WORD.fullmatch, value.split())))


class Parted(NamedTuple):
    """An environment in two parts: what may be shown, and the secrets."""

    open: dict[str, str]
    secret: dict[str, str]


def parted(environment: Mapping[str, str]) -> Parted:
    found = Parted({}, {})
    for name, value in environment.items():
        (found.secret if is_secret(name, value) else found.open)[name] = value
    return found


def without_secrets(text: str, environment: Mapping[str, str]) -> str:
    """The text without tokens, AWS keys, users and passwords in URLs, and the values of variables named as secrets."""
    secrets = [value for name, value in environment.items() if _NAME.search(name)]
    for value in sorted(secrets, key=len, reverse=True):  # one may contain another
        if len(value) >= _SHORTEST:
            text = text.replace(value, "***")
    return _VALUE.sub(lambda found: "://***@" if found[0].startswith("://") else "***", text)
