"""Kinds of monit events, with its words and status bits (monit 5.2.5 event.c). Pure."""

from __future__ import annotations

from typing import Final

import msgspec

from agent_shim.supervisor.monit.ast import (
    Changed,
    Checksum,
    Connection,
    Limit,
    Match,
    Missing,
    Owner,
    Permission,
    Ping,
    Restarts,
    Test,
)


class Kind(msgspec.Struct, frozen=True):
    """An event kind; ``bit`` is its ``status`` bit in the XML, the texts are its names in alerts."""

    bit: int
    failed: str
    succeeded: str
    changed: str


CHECKSUM: Final = Kind(0x1, "Checksum failed", "Checksum succeeded", "Checksum changed")
CONNECTION: Final = Kind(0x20, "Connection failed", "Connection succeeded", "Connection changed")
CONTENT: Final = Kind(0x8000, "Content failed", "Content succeeded", "Content match")
DATA: Final = Kind(0x800, "Data access error", "Data access succeeded", "Data access changed")
EXECUTION: Final = Kind(0x1000, "Execution failed", "Execution succeeded", "Execution changed")
FLAGS: Final = Kind(0x2000, "Filesystem flags failed", "Filesystem flags succeeded", "Filesystem flags changed")
GROUP: Final = Kind(0x100, "GID failed", "GID succeeded", "GID changed")
ICMP: Final = Kind(0x4000, "ICMP failed", "ICMP succeeded", "ICMP changed")
EXISTENCE: Final = Kind(0x200, "Does not exist", "Exists", "Existence changed")
PERMISSION: Final = Kind(0x40, "Permission failed", "Permission succeeded", "Permission changed")
PID: Final = Kind(0x40000, "PID failed", "PID succeeded", "PID changed")
PARENT: Final = Kind(0x80000, "PPID failed", "PPID succeeded", "PPID changed")
RESOURCE: Final = Kind(0x2, "Resource limit matched", "Resource limit succeeded", "Resource limit changed")
SIZE: Final = Kind(0x10, "Size failed", "Size succeeded", "Size changed")
TIMEOUT: Final = Kind(0x4, "Timeout", "Timeout recovery", "Timeout changed")
TIMESTAMP: Final = Kind(0x8, "Timestamp failed", "Timestamp succeeded", "Timestamp changed")
USER: Final = Kind(0x80, "UID failed", "UID succeeded", "UID changed")

ORDER: Final = (
    *(CHECKSUM, CONNECTION, CONTENT, DATA, EXECUTION, FLAGS, GROUP, ICMP, EXISTENCE, PERMISSION, PID, PARENT),
    *(RESOURCE, SIZE, TIMEOUT, TIMESTAMP, USER),
)
"""Order of monit's table: the first of several faults is reported."""

BITS: Final = {kind.failed: kind.bit for kind in ORDER}

_LIMITS: Final = {"size": SIZE, "timestamp": TIMESTAMP}
_CHANGES: Final = {
    "pid": PID,
    "ppid": PARENT,
    "checksum": CHECKSUM,
    "timestamp": TIMESTAMP,
    "size": SIZE,
    "fsflag": FLAGS,
}


class Complaint(msgspec.Struct, frozen=True):
    """A failed rule of a running service."""

    kind: Kind
    text: str


def kind_of(test: Test) -> Kind:
    """Return monit's event kind for the outcome of a test."""
    match test:
        case Limit(metric):
            return _LIMITS.get(metric, RESOURCE)
        case Changed(what):
            return _CHANGES[what]
        case Connection():
            return CONNECTION
        case Ping():
            return ICMP
        case Checksum():
            return CHECKSUM
        case Permission():
            return PERMISSION
        case Owner(what):
            return USER if what == "uid" else GROUP
        case Match():
            return CONTENT
        case Missing():
            return EXISTENCE
        case Restarts():
            return TIMEOUT
