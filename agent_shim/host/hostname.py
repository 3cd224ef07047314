"""Decides whether the agent may set the container's host name, and sets it."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Final

from agent_shim.host import files, mounts

HOST_NAME: Final = Path("/etc/hostname")
INITIAL_UTS_NAMESPACE: Final = 0xEFFFFFFE
"""Inode of the kernel's initial UTS namespace (include/linux/proc_ns.h)."""

_VALID: Final = r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,62}[A-Za-z0-9])?"
"""Matches names of up to 64 bytes that sethostname(2) accepts and that resolvers can look up."""


def obstacle() -> str:
    """Return the reason why the agent must not set the host name, or "" if it may.

    The agent must not set it if ``/etc/hostname`` is a mount, which means that the container runtime has set the host
    name itself, or if this process is in the machine's UTS namespace, where it would rename the machine.
    """
    if Path("/proc/self/ns/uts").stat().st_ino == INITIAL_UTS_NAMESPACE:
        return "the host name is that of the machine"
    if mounts.is_mount_point(HOST_NAME):
        return "the host name belongs to the container runtime"
    return ""


def set_host_name(name: str) -> str:
    """Set the host name as the Go agent does (SetupHostname in platform/linux_platform.go). Return "" on success,
    otherwise the reason for the failure. This function blocks.
    """
    if socket.gethostname() == name:
        return ""
    if re.fullmatch(_VALID, name) is None:
        return f"{name} is not a valid host name"
    if reason := obstacle():
        return reason
    try:
        socket.sethostname(name)
        files.write_atomic(HOST_NAME, f"{name}\n".encode())
    except OSError as exc:
        return f"cannot set the host name: {exc}"
    return ""
