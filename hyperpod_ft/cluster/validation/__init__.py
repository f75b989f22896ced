"""Checks of a cluster before it costs money."""
