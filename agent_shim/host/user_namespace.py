"""Detects user namespaces, in which root is not the machine's root. To keep ``bpm logs`` fast, this module imports
nothing.
"""

from __future__ import annotations

_WHOLE_RANGE = ["0", "0", "4294967295"]


def is_inside(uid_map: str = "/proc/self/uid_map") -> bool:
    """Return True if this process is in a user namespace in which not every uid is mapped to itself. Return False if
    the kernel does not support user namespaces.
    """
    try:
        with open(uid_map) as file:
            return file.read().split() != _WHOLE_RANGE
    except FileNotFoundError:
        return False


def overflow_user() -> int:
    """Return the uid that the kernel shows for all users without a mapping."""
    with open("/proc/sys/kernel/overflowuid") as file:
        return int(file.read())
