"""Removes secrets from what a tracker prints, before it is written to a file."""

import re
from collections.abc import Mapping

from hyperpod_ft.config.sections.cluster import SECRET_NAME

_USER_OF_URL = re.compile(r"(?<=://)[^/\s]+(?=@)")
_SHORTEST = 8  # characters: a shorter value is also found in words that are no secret


def redacted(text: str, environment: Mapping[str, str]) -> str:
    """The text without the values of variables that are named like secrets, and without the passwords of URLs."""
    for name, value in environment.items():
        if len(value) >= _SHORTEST and SECRET_NAME.search(name):
            text = text.replace(value, "***")
    return _USER_OF_URL.sub("***", text)
