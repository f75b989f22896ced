"""What training minimizes, what preferences are compared with, and the mean over the held-out rows."""
