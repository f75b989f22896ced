"""What the request of a training job starts: the copy of the kit's code that the job was created with, and no other.

The lines of this file are in the request itself. Whoever can write to the store could change everything else that a
container runs, but neither these lines nor the digest in the hyperparameters. Python 3.8's standard library only.
"""

import hashlib
import json
import runpy
import shutil
import signal
import sys
from pathlib import Path

# PID 1 ignores SIGTERM until it has a handler: a job that is stopped now would run, and be billed, two minutes more
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
ml, code = Path("/opt/ml"), Path("/tmp/hyperpod-ft-code")  # noqa: S108 - a container's own
wanted = json.loads((ml / "input/config/hyperparameters.json").read_text()).get("code", "")
# a copy: on a file system, other machines could still change the original, and Python compiles into it
shutil.copytree(str(ml / "input/data/code"), str(code), ignore=shutil.ignore_patterns("__pycache__"))
files = [path for path in code.rglob("*") if path.is_file()]
named = sorted([path.relative_to(code).as_posix(), hashlib.sha256(path.read_bytes()).hexdigest()] for path in files)
digest = hashlib.sha256(json.dumps(named).encode()).hexdigest()
if not wanted.endswith(f"-{digest[:32]}"):
    reason = f"code: what is in channel `code` is not {wanted}: somebody has changed it; submit the run again"
    (ml / "output").mkdir(exist_ok=True)
    (ml / "output/failure").write_text(reason)
    sys.exit(f"error: {reason}")
sys.argv[1:] = []
sys.path.insert(0, str(code))
runpy.run_path(str(code / "hyperpod_ft/sagemaker/container/entry.py"), run_name="__main__")
