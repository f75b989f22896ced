"""What training minimizes: the objectives, and what preferences are compared with."""
