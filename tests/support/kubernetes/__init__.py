"""Runs a Kubernetes node with the CPI on it, and makes the calls of a Director."""
