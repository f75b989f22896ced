"""What runs before the container has the kit's environment needs no package, and no newer Python than 3.8."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]
PARTS = (
    *sorted((ROOT / "hyperpod_ft/sagemaker/container").glob("*.py")),
    *(ROOT / "hyperpod_ft" / part for part in ("errors.py", "runs/job_files.py", "environments/image_interpreter.py")),
)


def test_they_are_written_in_the_language_of_3_8() -> None:
    for part in PARTS:
        ast.parse(part.read_text(), feature_version=(3, 8))


def test_they_import_the_standard_library_alone() -> None:
    # -S: no site-packages; -I: nothing of the environment
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import hyperpod_ft.sagemaker.container.entry"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
