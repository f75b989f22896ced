"""Base and tuned model side by side: greedy answers, exact matches, validation loss, scores on benchmarks."""
