"""BOSH on Kubernetes to try out: a node, a Director and a small deployment in one command."""
