"""Encoder-decoders: which can be trained, their size, and the memory of a training step."""
