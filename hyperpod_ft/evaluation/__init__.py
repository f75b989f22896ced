"""Base and tuned model side by side: greedy answers, exact matches and validation loss."""
