"""Byte-level BPE read from a model's files, where that gives the ids of the `tokenizers` library."""
