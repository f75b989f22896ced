"""What data-parallel ranks share: weights, gradients, optimizer state."""
