"""Several sources of one run: what an epoch has of each, which texts are there twice, and what is reported."""
