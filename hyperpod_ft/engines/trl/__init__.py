"""Engine trl: TRL's own trainers on accelerate."""
