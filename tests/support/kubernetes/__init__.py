"""A node of Kubernetes, the CPI on it, and calls of a Director."""
