"""Engine trl before training: what TRL takes of a run file, its memory, and its rules."""
