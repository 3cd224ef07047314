"""BOSH releases of this project: one with the Kubernetes CPI, and one that replaces monit."""
