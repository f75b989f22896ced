"""Texts that are shown or written have no secrets."""

import pytest

from hyperpod_ft.config.secrets import without_secrets


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:pass@index.example/simple", "https://***@index.example/simple"),
        ("mysql://me:p@ss@host/runs", "mysql://***@host/runs"),
        ("a token hf_abcdefghijklmno, a key AKIAIOSFODNN7EXAMPLE", "a token ***, a key ***"),
        ("task-12345678 of scikit-learn", "task-12345678 of scikit-learn"),
        ("denied: very-private-value", "denied: ***"),
        ("very-private-value-and-more", "***"),  # not what the shorter one leaves of it
        ("short ab", "short ab"),
    ],
)
def test_secrets_are_removed(text: str, shown: str) -> None:
    environment = {
        "API_KEY": "very-private-value",
        "LONGER_TOKEN": "very-private-value-and-more",
        "OTHER_KEY": "ab",
        "HOME": "index.example",
    }
    assert without_secrets(text, environment) == shown
