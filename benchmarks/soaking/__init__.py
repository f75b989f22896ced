"""Parts of `python -m benchmarks.soak`: faults, a user who goes on in spite of them, and what must be unchanged."""
