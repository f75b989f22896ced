"""What run files and cluster files may say, parsed into frozen models."""
