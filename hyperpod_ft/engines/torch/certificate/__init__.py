"""The certificate of engine torch.

Where a run divides layers, rows or experts, two ranks along each axis have one rank's losses.
"""
