"""What a run has measured and answered: metrics, hours of nodes, samples, and the figures made of them."""
