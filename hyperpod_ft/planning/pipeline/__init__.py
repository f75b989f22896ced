"""Pipeline parallelism of engine torch: where a model is cut, and what its schedule costs."""
