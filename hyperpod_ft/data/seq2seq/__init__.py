"""Training data of encoder-decoders: each example is a source, which the encoder reads, and a target to predict."""
