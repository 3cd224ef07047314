"""The daemon: boot, wiring of services and edges, recovery of jobs, and shutdown."""
