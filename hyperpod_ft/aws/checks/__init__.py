"""Checks of an account before money is spent, for whatever is to run there: what a user named exists and fits."""
