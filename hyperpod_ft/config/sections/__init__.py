"""The sections of a run file, a module each: every key with its meaning, unit and default."""
