"""Checks of an account before money is spent: the resources that a user named exist and are compatible."""
