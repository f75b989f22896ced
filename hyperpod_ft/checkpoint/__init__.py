"""Checkpoints and models on disk.

One idea in the middle: a set of logical tensors, each with its final name, dtype, shape and the byte ranges of its
pieces (`logical_tensor`). Readers make that description from metadata alone (`nxd`, `dcp`, `safetensors_file`;
`sharded` chooses); `reading` turns descriptions into data; one writer streams tensors into safetensors
(`safetensors_writer`), in a directory that appears whole (`resumable`).
"""
