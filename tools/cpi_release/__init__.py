"""This project's BOSH releases: one with the Kubernetes CPI, and one that replaces monit."""
