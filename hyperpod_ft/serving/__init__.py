"""The tuned model, answering: a server on this machine or a node, and endpoints of SageMaker."""
