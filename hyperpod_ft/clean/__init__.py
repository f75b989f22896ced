"""What grows on the volume: what it takes, what still needs it, and removing it."""
