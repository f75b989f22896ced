"""`hyperpod-ft deploy`: an endpoint of SageMaker that is asked the run's own prompts. Imports no torch."""
