"""Rows for a reader: their examples token by token, which tokens are trained, and why each is there."""
