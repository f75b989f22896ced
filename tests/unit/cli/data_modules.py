"""What `data show` imports: forks of the process that has it start at once (tests/forking.py)."""
# ruff: noqa: E402

from hyperpod_ft.data.tokenizer import without_torch

without_torch()

import transformers

import hyperpod_ft.cli.main
import hyperpod_ft.report.rows_page
import hyperpod_ft.runs.shown_rows  # noqa: F401

assert transformers.AutoTokenizer  # imported when it is first asked for
