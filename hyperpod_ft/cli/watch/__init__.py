"""Showing runs while they work: `watch` and `submit --watch` on a terminal, in lines elsewhere; `view` in a browser."""
