"""The daemon: boot, wiring of services and edges, job recovery, and shutdown."""
