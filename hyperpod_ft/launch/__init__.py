"""From a plan to jobs and back: render, submit, watch."""
