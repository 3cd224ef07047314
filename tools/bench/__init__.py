"""Resources and latencies of an agent, measured through the wire alone."""
