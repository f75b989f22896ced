"""Access to the nodes of a cluster: ssh through SSM."""
