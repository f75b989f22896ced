"""Configuration files of other tools as run files: a table for each tool says what becomes of each of its keys."""
