"""Pipeline parallelism: the part of a model on a rank, and the schedule of a step."""
