"""Benchmarks of an agent's resources and latencies. They measure any agent that speaks the protocol."""
