"""hyperpod-ft: fine-tune language models as a chain of Slurm jobs."""

__version__ = "0.1.0"
