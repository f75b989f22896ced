"""A run in SageMaker: its stages as training jobs (launcher `sagemaker`), and endpoints of the tuned model."""
