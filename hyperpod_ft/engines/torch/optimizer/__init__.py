"""AdamW on this rank's shards of the trained weights."""
