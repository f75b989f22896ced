"""What the rendered scripts start on the nodes, around the ranks."""
