"""Text that cannot control a terminal."""


def printable(text: str, keep: str = "") -> str:
    """`text` with a `?` for each character that does not print, except those in `keep`.

    Models, programs and names of tensors may hold sequences that control a terminal.
    """
    return "".join(character if character.isprintable() or character in keep else "?" for character in text)
