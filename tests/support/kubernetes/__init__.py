"""Runs a Kubernetes node and this project's CPI, and calls the CPI as a Director does."""
