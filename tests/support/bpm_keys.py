"""Records how far each bpm.yml key is supported at each isolation level.

docs/bpm.md shows this as a table, and tests in ``tests/root`` verify it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

HONOURED: Final[Mapping[str, tuple[str, str, str]]] = {
    "name": ("yes", "yes", "yes"),
    "executable": ("yes", "yes", "yes"),
    "args": ("yes", "yes", "yes"),
    "env": ("yes", "yes", "yes"),
    "workdir": ("yes", "yes", "yes"),
    "hooks.pre_start": ("yes", "yes", "yes"),
    "capabilities": (
        "if the container has them",
        "if the container has them",
        "those that the container has, if the agent is root",
    ),
    "limits.memory": (
        "cgroup, otherwise checked every second",
        "cgroup, otherwise checked every second",
        "cgroup, otherwise checked every second",
    ),
    "limits.open_files": ("up to the container's limit", "up to the container's limit", "up to the container's limit"),
    "limits.processes": ("with a cgroup", "with a cgroup", "with a cgroup"),
    "limits.core_file_size": (
        "up to the container's limit",
        "up to the container's limit",
        "up to the container's limit",
    ),
    "ephemeral_disk": ("yes", "yes", "directories are created, access is not restricted"),
    "persistent_disk": ("yes", "yes", "directories are created, access is not restricted"),
    "additional_volumes[].path": ("yes", "yes", "directories are created, access is not restricted"),
    "additional_volumes[].writable": ("yes", "yes", "not enforced"),
    "additional_volumes[].allow_executions": ("yes", "yes", "not enforced"),
    "additional_volumes[].mount_only": ("yes", "yes", "yes"),
    "additional_volumes[].shared": (
        "yes",
        "no effect, because nothing is mounted",
        "no effect, because nothing is mounted",
    ),
    "unsafe.privileged": (
        "yes",
        "only the container's privileges; access is not restricted",
        "only the container's privileges",
    ),
    "unsafe.unrestricted_volumes": ("yes", "yes; everything under the path is accessible", "not enforced"),
    "unsafe.host_pid_namespace": (
        "yes",
        "yes; lets the process signal all processes (it can see them even without this key)",
        "always on",
    ),
    "shutdown_signal": ("yes", "yes", "yes"),
}
"""Support for each key at isolation levels 1, 2 and 3."""


def table() -> str:
    """Render ``HONOURED`` as a Markdown table. Keys with the same support share a row."""
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for key, levels in HONOURED.items():
        grouped.setdefault(levels, []).append(f"`{key}`")
    rows = [f"| {', '.join(keys)} | {' | '.join(levels)} |" for levels, keys in grouped.items()]
    return "\n".join(["| key | level 1 | level 2 | level 3 |", "|---|---|---|---|", *rows])
