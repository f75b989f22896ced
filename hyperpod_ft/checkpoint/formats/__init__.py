"""Files of checkpoints and models: safetensors, torch.save, pickles read without running code, model directories."""
