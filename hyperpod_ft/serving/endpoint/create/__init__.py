"""What an endpoint is made of, whether the model fits, what it costs, and making it."""
