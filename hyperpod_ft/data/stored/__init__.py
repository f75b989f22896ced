"""What of a dataset is too much for memory: tokens, numbers and packings in unnamed files."""
