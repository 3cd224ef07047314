"""A Kubernetes CPI for BOSH, API version 3: a program that serves one request from a Director by calling the Kubernetes
API.

``python -m kubernetes_cpi [--config FILE]`` reads one JSON request from standard input and writes one JSON response to
standard output. docs/cpi.md describes its use. This package does not import ``agent_shim``.
"""
