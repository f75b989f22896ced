"""`hyperpod-ft init`, and files that commands write for the user to edit."""
