"""The only code that forks, mounts, sends signals and reads ``/proc``."""
