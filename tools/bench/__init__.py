"""Benchmarks for an agent's resource usage and latency. They measure any agent that speaks the protocol."""
