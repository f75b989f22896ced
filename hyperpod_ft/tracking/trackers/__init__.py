"""One module for each tracker, imported only by publisher.py, with the interpreter that has the tracker's package."""
