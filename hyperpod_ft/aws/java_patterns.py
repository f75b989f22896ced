"""The regular expressions of AWS's service models, which are Java's, as Python's `re` reads them.

What differs and occurs there: Unicode categories (`\\p{L}`), surrogate pairs, `\\z`, a hyphen after a class
(`[\\w-.]`), `$` with a repetition, `(?i)` in the middle.
"""

import functools
import re
import sys
import unicodedata
from collections import defaultdict

_POSIX = {
    "Alnum": "a-zA-Z0-9",
    "Alpha": "a-zA-Z",
    "Digit": "0-9",
    "Lower": "a-z",
    "Upper": "A-Z",
    "Punct": r"!-/:-@\[-`{-~",
    "Graph": "!-~",
    "Print": " -~",
    "Space": r" \t\n\x0b\f\r",
    "ASCII": r"\x00-\x7f",
    "Cntrl": r"\x00-\x1f\x7f",
    "Blank": r" \t",
    "XDigit": "0-9a-fA-F",
}
_CATEGORY = re.compile(r"\\([pP])(?:\{(\w+)\}|([A-Z]))")
_ANY_BEYOND_16_BITS = r"\uD800\uDC00-\uDBFF\uDFFF"  # as Java's UTF-16 has it


@functools.cache
def compile_java(pattern: str) -> re.Pattern[str] | None:
    """To be used with `fullmatch`, as AWS does. None for what has no counterpart (set intersections, say)."""
    text = pattern.replace(_ANY_BEYOND_16_BITS, r"\U00010000-\U0010FFFF")
    text = text.replace(r"\z", r"\Z")
    text = re.sub(r"\\x\{([0-9A-Fa-f]{2})\}", r"\\x\1", text)
    text = re.sub(r"(?<!\\)\$\{\d+,\d+\}", "$", text)
    if "(?i)" in text:
        text = "(?i)" + text.replace("(?i)", "")
    # A class cannot begin a range: the hyphen after it is itself. The one after a \p is seen before it is replaced.
    text = re.sub(r"(\\[wsd]|\\[pP]\{\w+\})-(?!\])", r"\1\\-", text) if "[" in text else text
    if "&&" in text or "||" in text:
        return None
    try:
        # Java's \d, \w and \s are ASCII's
        return re.compile(_with_categories(text), re.ASCII)
    except (re.error, KeyError):
        return None


def _with_categories(text: str) -> str:
    """`\\p{L}` as the characters it stands for; Python's classes can hold no other class but \\d, \\w and \\s."""
    parts = []
    end = 0
    for found in _CATEGORY.finditer(text):
        parts.append(text[end : found.start()])
        characters = _characters(found[2] or found[3], found[1] == "P")
        parts.append(characters if _inside_brackets(text[: found.start()]) else f"[{characters}]")
        end = found.end()
    return "".join((*parts, text[end:]))


def _inside_brackets(before: str) -> bool:
    inside = False
    for part in re.findall(r"\\.|\[|\]", before):
        inside = part == "[" or (inside and part != "]")
    return inside


@functools.cache
def _characters(name: str, negated: bool) -> str:
    """Raises KeyError for a name that is neither POSIX's nor a Unicode category."""
    if name == "IsAlphabetic":
        name = "L"
    if name in _POSIX and not negated:
        return _POSIX[name]
    categories = _categories()
    chosen = {category for category in categories if category.startswith(name)}
    if not chosen:
        raise KeyError(name)
    if negated:
        chosen = categories.keys() - chosen
    return "".join(ranges for category in sorted(chosen) for ranges in categories[category])


@functools.cache
def _categories() -> dict[str, list[str]]:
    """Each Unicode category's characters as ranges of a class, escaped. About 0.2 s, and only where a pattern asks."""
    ranges: dict[str, list[str]] = defaultdict(list)
    first, current = 0, unicodedata.category("\0")
    for code in range(1, sys.maxunicode + 2):
        category = unicodedata.category(chr(code)) if code <= sys.maxunicode else ""
        if category != current:
            ranges[current].append(f"\\U{first:08x}-\\U{code - 1:08x}")
            first, current = code, category
    return dict(ranges)
