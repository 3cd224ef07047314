"""BOSH on Kubernetes for the curious: a node, a Director and a small deployment in one command."""
