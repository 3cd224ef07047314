"""Access to the operating system: only this floor forks, mounts, sends signals and reads ``/proc``."""
