"""HyperPod's API: requests, nodes, logs, waiting."""
