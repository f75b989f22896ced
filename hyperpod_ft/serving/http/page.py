"""The chat page: one static file, allowed to load nothing but this server's own answers."""

import base64
import hashlib
import html
import re
from dataclasses import dataclass
from pathlib import Path

_FILE = Path(__file__).with_name("page.html")
_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


@dataclass(frozen=True)
class Page:
    """`headers` allow the file's own script and style, by digest, and requests to this server; nothing else."""

    text: str
    headers: dict[str, str]

    @classmethod
    def load(cls) -> "Page":
        text = _FILE.read_text(encoding="utf-8")
        digests: dict[str, str] = {}
        for kind, content in _INLINE.findall(text):
            digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
            digests[kind] = f"'sha256-{digest}'"
        policy = (
            f"default-src 'none'; script-src {digests['script']}; style-src {digests['style']}; connect-src 'self';"
            " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        return cls(text, {"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer"})

    def render(self, title: str) -> bytes:
        return self.text.replace("{{ title }}", html.escape(title)).encode()
