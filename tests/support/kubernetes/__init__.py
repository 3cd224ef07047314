"""Runs a Kubernetes node with the CPI, and makes the same calls as a Director."""
