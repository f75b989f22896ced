"""Writes run files: for a model, a dataset and an instance type, or from the configuration of another tool."""
