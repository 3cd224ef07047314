"""Access to the operating system: processes, signals, mounts, cgroups, files and ``/proc``."""
