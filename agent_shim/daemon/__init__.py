"""The daemon: boot, the wiring of services and edges, recovery of jobs, shutdown, the worker process."""
