"""AdamW on this rank's part of the trained weights."""
