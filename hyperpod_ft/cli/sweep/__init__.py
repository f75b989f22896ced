"""`hyperpod-ft sweep`: the commands on sweeps, and what they print."""
