"""The chat page: one static file, allowed to load nothing but this server's own answers."""

import html
import re
from dataclasses import dataclass
from pathlib import Path

from hyperpod_ft.report.html import content_policy

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
        inline = dict(_INLINE.findall(text))
        policy = content_policy({"page.js": inline["script"], "page.css": inline["style"]}, connects=True)
        policy += "; img-src data:; frame-ancestors 'none'"
        return cls(text, {"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer"})

    def render(self, title: str) -> bytes:
        return self.text.replace("{{ title }}", html.escape(title)).encode()
