"""Checkpoints and models on disk.

One idea in the middle: a set of logical tensors, each with its final name, dtype, shape and the byte ranges of its
pieces (`layout`). Readers make that description from metadata alone (`dcp`, `safetensors_file`); `reading` turns
descriptions into blocks of rows; one writer streams blocks into safetensors (`safetensors_writer`).
"""
