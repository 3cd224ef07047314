"""The host name of the container: whether it is the agent's to set, and setting it."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from agent_shim.core.errors import HostError
from agent_shim.host import files, mounts

HOST_NAME: Final = Path("/etc/hostname")
INITIAL_UTS_NAMESPACE: Final = 0xEFFFFFFE
"""Inode of the namespace that the kernel starts with (include/linux/proc_ns.h)."""

_VALID: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,62}[A-Za-z0-9])?")
"""What sethostname(2) takes, 64 bytes at most, and resolvers find."""


def owner(table: Sequence[mounts.Mount] | None = None) -> str:
    """Who sets the host name instead of the agent; "" where it is the agent's to set.

    A runtime that gives a container a name mounts ``/etc/hostname``; without a UTS namespace the name is that of the
    machine below, and of everything else on it.
    """
    if Path("/proc/self/ns/uts").stat().st_ino == INITIAL_UTS_NAMESPACE:
        return "the host name is that of the machine"
    if mounts.is_mount_point(HOST_NAME, table):
        return "the host name belongs to the container runtime"
    return ""


def set_host_name(name: str) -> str:
    """Name the container as SetupHostname does (platform/linux_platform.go); why not, or "". Blocks on the disk."""
    if socket.gethostname() == name:
        return ""
    if _VALID.fullmatch(name) is None:
        return f"{name} is no host name"
    if kept := owner():
        return kept
    try:
        socket.sethostname(name)
        files.write_atomic(HOST_NAME, f"{name}\n".encode())
    except (OSError, HostError) as exc:
        return f"cannot set the host name: {exc}"
    return ""
