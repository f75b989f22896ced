"""Launcher `sagemaker`: a run's stages as SageMaker training jobs."""
