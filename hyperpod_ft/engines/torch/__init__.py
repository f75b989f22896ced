"""Engine torch: native PyTorch on CPUs and GPUs."""
