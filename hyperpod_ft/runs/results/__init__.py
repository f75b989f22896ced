"""What a run has measured and answered: metrics, hours of nodes, samples, and the summary of a training run."""
