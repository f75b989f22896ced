"""Pauses Python's garbage collection while large packages are imported.

torch and transformers make a million objects and hardly any garbage. Searching them takes a sixth to a quarter of the
time of their import, and again in each full collection and at exit.
"""

import gc


def pause_collection() -> None:
    """Stop searching for garbage; called before the imports."""
    gc.disable()


def resume_collection() -> None:
    """Search again, but leave out all objects that exist now; called after the imports."""
    gc.freeze()
    gc.enable()
