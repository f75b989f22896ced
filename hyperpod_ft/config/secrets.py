"""What looks like a secret, and texts without secrets."""

import re
from collections.abc import Mapping

SECRET_NAME = re.compile(r"TOKEN(?!IZERS)|SECRET|PASS(WORD|WD|PHRASE)|CREDENTIAL|AUTH|KEY", re.IGNORECASE)
_VALUE = re.compile(r"://[^/\s]*@|\b(hf_|ghp_|github_pat_|sk-|AKIA|ASIA)[A-Za-z0-9_-]{8,}")
_SHORTEST = 6  # characters: a shorter value of a variable is also found in words that are no secret


def holds_secret(text: str) -> bool:
    """Whether a text appears to contain a password or a token."""
    return bool(_VALUE.search(text))


def without_secrets(text: str, environment: Mapping[str, str]) -> str:
    """The text without tokens, AWS keys, users and passwords in URLs, and the values of variables named as secrets."""
    secrets = [value for name, value in environment.items() if SECRET_NAME.search(name)]
    for value in sorted(secrets, key=len, reverse=True):  # one may contain another
        if len(value) >= _SHORTEST:
            text = text.replace(value, "***")
    return _VALUE.sub(lambda found: "://***@" if found[0].startswith("://") else "***", text)
