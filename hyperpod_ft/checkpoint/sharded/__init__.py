"""From what training wrote to logical tensors."""
