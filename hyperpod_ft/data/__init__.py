"""Training data: raw files to rows, rows to text, text to tokens, and tokens to packed rows."""
