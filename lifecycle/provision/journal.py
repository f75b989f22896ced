"""The log of a run: plain lines for people, and one JSON object an event in /var/log/provision/steps.jsonl."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path


@dataclass
class Journal:
    """Writes events of the step that `step` names. A line is one write, so processes do not mix theirs."""

    file: Path | None
    """None for a dry run, which leaves nothing behind."""
    step: str = ""

    def write(self, event: str, message: str = "", seconds: float = 0.0) -> None:
        """Record one event. `seconds`: its duration, 0 if it has none."""
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        took = f" ({seconds:.1f} s)" if seconds else ""
        suffix = f": {message}" if message else ""
        print(f"{now} {self.step or 'provision'}: {event.replace('_', ' ')}{took}{suffix}", flush=True)
        if self.file is None:
            return
        line = {"time": now, "step": self.step, "event": event, "seconds": round(seconds, 3), "message": message}
        # A full disk must not end the run.
        with suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            with os.fdopen(descriptor, "wb", buffering=0) as stream:
                stream.write(json.dumps(line).encode() + b"\n")
