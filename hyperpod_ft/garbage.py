"""Imports of large packages without Python's search for garbage.

torch and transformers make a million objects and hardly any garbage. Searching them takes a sixth to a quarter of the
time of their import, and again in each full collection and at exit.
"""

import gc


def pause_collection() -> None:
    """Before the imports: stop searching for garbage."""
    gc.disable()


def resume_collection() -> None:
    """After the imports: search again, but leave out all objects that exist now."""
    gc.freeze()
    gc.enable()
