"""Slurm as a launcher: the only modules that call its programs, apart from those of localcluster/."""
