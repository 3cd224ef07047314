"""A trial of BOSH on Kubernetes: one command creates a node, a Director and a small deployment."""
