"""Sizes of models whose layers engine torch does not divide: mixtures of experts, and types that have no row."""
