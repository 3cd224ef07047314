"""A BOSH agent and process supervisor for containers and Kubernetes pods."""

__version__ = "0.2.0"
