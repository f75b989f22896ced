"""Count exact answers to each kind of unseen rows (make_data.py) apart, of the newest quickstart run below a directory.

python examples/quickstart/count_unseen.py .quickstart/runs/quickstart
"""

import json
import sys
from pathlib import Path
from typing import Any

from make_data import read_rows

WORDS = {"pair": "pairs of values", "phrasing": "phrasings"}


def lines(samples: list[dict[str, Any]]) -> list[str]:
    """`samples`: those of the run's samples.json, of which the validation rows count."""
    kinds = {row["request"]: row["unseen"] for row in read_rows() if "unseen" in row}
    made = []
    for kind, words in WORDS.items():
        found = [row for row in samples if row["split"] == "validation" and kinds.get(row["prompt"].strip()) == kind]
        base, tuned = (sum(row[f"{model}_exact"] for row in found) for model in ("base", "tuned"))
        made.append(f"exact answers, unseen {words}: base {base}/{len(found)}, tuned {tuned}/{len(found)}")
    return made


def main() -> None:
    """Print a line for each kind."""
    newest = max(Path(sys.argv[1]).rglob("samples.json"), key=lambda path: path.stat().st_mtime)
    print("\n".join(lines(json.loads(newest.read_text(encoding="utf-8"))["samples"])))


if __name__ == "__main__":
    main()
