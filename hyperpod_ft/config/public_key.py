"""Public ssh keys, each a line as in ~/.ssh/id_ed25519.pub: kind, base64, comment; without options before them."""

import base64
import binascii
import re

KINDS = (
    "ssh-ed25519",
    "ecdsa-sha2-nistp256",
    "ecdsa-sha2-nistp384",
    "ecdsa-sha2-nistp521",
    "ssh-rsa",
    "sk-ssh-ed25519@openssh.com",
    "sk-ecdsa-sha2-nistp256@openssh.com",
)


def problem(line: str) -> str:
    """What keeps this line from being a public key; empty if nothing does."""
    match = re.fullmatch(r"(\S+) ([A-Za-z0-9+/]+={0,2})( .*)?", line)
    if match is None or not line.isprintable() or match[1] not in KINDS:
        return f"must be one line with an ssh public key (one of {', '.join(KINDS)}, then base64)"
    try:
        data = base64.b64decode(match[2], validate=True)
    except binascii.Error:
        data = b""
    # RFC 4253, 6.6: the key's data starts with its kind, as a string with its length in four bytes
    begins = len(match[1]).to_bytes(4, "big") + match[1].encode()
    if not data.startswith(begins) or len(data) == len(begins):
        return f"the data is not a {match[1]} key; copy the line again"
    return ""


def checked(line: str) -> str:
    """The line. Raises ValueError if it is not a public key."""
    if wrong := problem(line):
        raise ValueError(wrong)
    return line
