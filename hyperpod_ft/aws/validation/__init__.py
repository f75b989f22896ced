"""What can be checked of a cluster before money is spent."""
