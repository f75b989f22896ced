"""Make preferences.jsonl from qa.jsonl: of two answers to a question, a sentence is preferred to the bare words.

python examples/quickstart/make_preferences.py
"""

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def preference(row: dict[str, str]) -> dict[str, Any]:
    """The pair made of a question, in TRL's conversational format."""
    return {
        "prompt": [{"role": "user", "content": row["instruction"]}],
        "chosen": [{"role": "assistant", "content": f"The answer is {row['response']}."}],
        "rejected": [{"role": "assistant", "content": row["response"]}],
    }


def main() -> None:
    """Write a row for each question without a context."""
    rows = [json.loads(line) for line in (HERE / "qa.jsonl").read_text(encoding="utf-8").splitlines()]
    text = "".join(json.dumps(preference(row), ensure_ascii=False) + "\n" for row in rows if not row["context"])
    (HERE / "preferences.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
