"""How a request is answered: by torch, token by token, several at once."""
