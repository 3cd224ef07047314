"""A Kubernetes CPI for BOSH, API version 3: a program that turns one request of a Director into calls to a cluster.

``python -m kubernetes_cpi [--config FILE]`` reads one JSON request from its standard input and writes one JSON response
to its standard output. Docs/cpi.md describes its use. Nothing of ``agent_shim`` is imported here.
"""
