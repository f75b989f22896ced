"""Training data: raw files to raw rows, raw rows to text, text to tokens, and tokens to packed rows."""
