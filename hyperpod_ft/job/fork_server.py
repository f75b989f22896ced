"""What the process that ranks are forked from does first; only that process imports this module (forked_ranks.py)."""

import os
import signal

from hyperpod_ft import gc_pause
from hyperpod_ft.processes import die_with_parent

die_with_parent(os.getppid(), signal.SIGKILL)
gc_pause.pause_collection()  # a rank resumes it once its engine is imported
