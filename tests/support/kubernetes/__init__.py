"""A Kubernetes node, the CPI on it, and the calls of a Director."""
