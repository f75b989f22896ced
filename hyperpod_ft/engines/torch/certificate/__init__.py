"""The certificate of a model: what a small random one of its kind proves before anything is trained."""
