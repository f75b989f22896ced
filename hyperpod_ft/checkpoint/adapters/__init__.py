"""PEFT adapters."""
