"""Encoder-decoders: which can be trained, and their size."""
