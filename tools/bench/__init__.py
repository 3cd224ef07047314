"""Benchmarks of an agent's resources and latencies, measured only through its protocol."""
