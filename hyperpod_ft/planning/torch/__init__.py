"""Engine torch before training: its rules, its memory, and the sharding that fits."""
