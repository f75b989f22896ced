"""What answers are worth: the kit's own functions, the user's, and the process that calls them."""
