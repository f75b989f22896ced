"""`watch` and `submit --watch`: a view of a run on a terminal, lines elsewhere."""
