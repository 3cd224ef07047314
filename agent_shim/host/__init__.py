"""Access to the operating system: processes and signals, mounts, cgroups, files and ``/proc``."""
