"""Find the Slurm and munge programs on this machine, or say what to install."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass

from hyperpod_ft.errors import UserError

# Daemons live in sbin, which is not on an ordinary user's PATH; HyperPod and DLAMI build Slurm in /opt/slurm.
_EXTRA_PATH = ("/usr/sbin", "/sbin", "/usr/local/sbin", "/opt/slurm/sbin", "/opt/slurm/bin")

_PACKAGE = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "munged": "munge",
    "sinfo": "slurm-client",
    "scontrol": "slurm-client",
}


@dataclass(frozen=True)
class Programs:
    """Absolute paths of a local cluster's programs, and the Slurm version as (year, month): 22.05 is (22, 5)."""

    slurmctld: str
    slurmd: str
    munged: str
    sinfo: str
    scontrol: str
    version_text: str

    @property
    def version(self) -> tuple[int, int]:
        """Year and month of the release, to compare with the release that introduced a setting."""
        match = re.match(r"(\d+)\.(\d+)", self.version_text)
        return (int(match[1]), int(match[2])) if match else (0, 0)


def find_programs() -> Programs:
    """Look on PATH and in the usual sbin directories.

    Raises UserError with the Debian packages to install, or with an alternative if the platform cannot run slurmd.
    """
    if sys.platform != "linux":
        raise UserError(
            f"a local Slurm cluster needs Linux, not {sys.platform}",
            "rehearse with `hyperpod-ft submit --launcher process` instead",
        )
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *_EXTRA_PATH])
    found = {name: shutil.which(name, path=path) for name in _PACKAGE}
    missing = [name for name, where in found.items() if where is None]
    if missing:
        packages = " ".join(sorted({_PACKAGE[name] for name in missing}))
        raise UserError(
            f"a local Slurm cluster needs {', '.join(missing)}, not found on PATH or in /usr/sbin",
            f"on Debian or Ubuntu: sudo apt-get install --no-install-recommends {packages}",
        )
    paths = {name: where for name, where in found.items() if where is not None}
    return Programs(**paths, version_text=_version(paths["slurmctld"]))


def _version(slurmctld: str) -> str:
    """`slurm-wlm 22.05.8` (Debian) or `slurm 23.11.4` -> the number."""
    answer = subprocess.run([slurmctld, "-V"], capture_output=True, text=True, timeout=20, check=False)
    words = answer.stdout.split()
    if answer.returncode or not words:
        raise UserError(
            f"{slurmctld} -V failed: {answer.stderr.strip() or 'no error message'}", "reinstall the slurmctld package"
        )
    return words[-1]
