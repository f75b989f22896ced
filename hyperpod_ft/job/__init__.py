"""What the rendered scripts start on the nodes of a job, around the stages."""
