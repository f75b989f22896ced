"""The programs that the rendered scripts start on a job's nodes, around the stages."""
