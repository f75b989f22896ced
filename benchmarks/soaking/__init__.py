"""Parts of `python -m benchmarks.soak`: the faults, a user who resumes after them, and the checks of what is left."""
