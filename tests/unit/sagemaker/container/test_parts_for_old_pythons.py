"""What runs before the container has the kit's environment needs no package, and no newer Python than 3.8."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]
# entry.py and what it imports
PARTS = (
    *(
        "__init__",
        "command_client",
        "entry",
        "host",
        "interpreter",
        "messages",
        "on_every_host",
        "script",
        "start",
    ),
    *("../../job/job_node", "../../errors", "../../runs/job_files"),
)


def test_they_are_written_in_the_language_of_3_8() -> None:
    for part in PARTS:
        path = ROOT / "hyperpod_ft" / "sagemaker" / "container" / f"{part}.py"
        ast.parse(path.read_text(), feature_version=(3, 8))


def test_they_import_the_standard_library_alone() -> None:
    # -S: no site-packages; -I: nothing of the environment
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import hyperpod_ft.sagemaker.container.entry"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
