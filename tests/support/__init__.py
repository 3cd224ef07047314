"""Helpers that tests and tools share, such as a message bus, a Director, simulated machines and volumes."""
