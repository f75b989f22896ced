"""The reader of a page: a home, and programs that come before all others."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.pages.blocks import ROOT

BIN = Path(sys.executable).parent  # of the kit, and of the AWS CLI
# Stands in for curl, at whose file GSM8K's rows would be: 60 with answers that end alike, which fill a few packed rows.
CURL = """\
#!/usr/bin/env python
import json, sys
with open(sys.argv[2], "w") as file:
    for n in range(60):
        row = dict(question=f"How many clips are {n} and {n}?", answer=f"{n} and {n} are {2 * n}.\\n#### {2 * n}")
        print(json.dumps(row), file=file)
"""
# Types the YAML that is in $TYPED into a run file: keys of its sections.
EDITOR = """\
#!/usr/bin/env python
import os, sys, yaml
values = yaml.safe_load(open(sys.argv[1]))
for typed in yaml.safe_load_all(os.environ["TYPED"]):
    for section, keys in typed.items():
        values[section] = values.get(section, {}) | keys if isinstance(keys, dict) else keys
yaml.safe_dump(values, open(sys.argv[1], "w"))
"""


def environment(home: Path, variables: Mapping[str, str] = os.environ, **more: str) -> dict[str, str]:
    """Variables of the reader's shell, in which `home`/bin comes first in PATH."""
    own = {
        "HOME": str(home),
        "XDG_STATE_HOME": str(home / "state"),
        "PATH": os.pathsep.join([str(home / "bin"), str(BIN), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    return {**variables, **own, **more}


def clone(target: Path, without: str = "-") -> None:
    """The files of this checkout that git tracks, as they are now; not those below `without`."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        if not name.startswith(without):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)
