"""Puts finished models on the Hugging Face Hub."""
