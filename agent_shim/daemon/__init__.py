"""The daemon: boot, the wiring between services and edges, job recovery, and shutdown."""
