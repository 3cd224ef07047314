"""Defines the kinds of events, with monit's names and status bits (monit 5.2.5 event.c). Does no I/O."""

from __future__ import annotations

from typing import Final

import msgspec

from agent_shim.supervisor.monit import ast as values


class EventKind(msgspec.Struct, frozen=True):
    """An event kind. ``bit`` is its bit in the ``status`` of monit's XML. ``failed``, ``succeeded`` and ``changed`` are
    its names in alerts.
    """

    bit: int
    failed: str
    succeeded: str
    changed: str = ""


def _kind(bit: int, word: str, changed: str = "") -> EventKind:
    """Return a kind with the alert names ``WORD failed``, ``WORD succeeded`` and ``WORD changed``. If ``changed`` is
    given, it replaces the last of these names.
    """
    return EventKind(bit, f"{word} failed", f"{word} succeeded", changed or f"{word} changed")


CHECKSUM: Final = _kind(0x1, "Checksum")
CONNECTION: Final = _kind(0x20, "Connection")
CONTENT: Final = _kind(0x8000, "Content", "Content match")
DATA: Final = EventKind(0x800, "Data access error", "Data access succeeded")
EXECUTION: Final = _kind(0x1000, "Execution")
EXISTENCE: Final = EventKind(0x200, "Does not exist", "Exists")
FSFLAG: Final = _kind(0x2000, "Filesystem flags")
GID: Final = _kind(0x100, "GID")
ICMP: Final = _kind(0x4000, "ICMP")
INVALID: Final = EventKind(0x400, "Invalid type", "Type succeeded")
PERMISSION: Final = _kind(0x40, "Permission")
PID: Final = _kind(0x40000, "PID")
PPID: Final = _kind(0x80000, "PPID")
RESOURCE: Final = EventKind(0x2, "Resource limit matched", "Resource limit succeeded")
SIZE: Final = _kind(0x10, "Size")
TIMEOUT: Final = EventKind(0x4, "Timeout", "Timeout recovery")
TIMESTAMP: Final = _kind(0x8, "Timestamp")
UID: Final = _kind(0x80, "UID")

ORDER: Final = (
    *(CHECKSUM, CONNECTION, CONTENT, DATA, EXECUTION, FSFLAG, GID, ICMP, INVALID, EXISTENCE, PERMISSION, PID, PPID),
    *(RESOURCE, SIZE, TIMEOUT, TIMESTAMP, UID),
)
"""The kinds in the order of monit's table. If a service has several faults, the first kind in this order is
reported.
"""

HINTS: Final = {kind.changed: kind.bit for kind in ORDER if kind.changed}
"""Maps monit's name for a change to the status bit of its event kind. In monit's XML, these bits are set in
``status_hint`` as well as in ``status``.
"""
BITS: Final = {kind.failed: kind.bit for kind in ORDER} | HINTS
"""Maps monit's names for failures and changes to the status bits of their event kinds."""


class Complaint(msgspec.Struct, frozen=True):
    """A failed rule of a running service."""

    kind: EventKind
    text: str
    is_change: bool = False

    @property
    def word(self) -> str:
        """The event's name in alerts."""
        return self.kind.changed if self.is_change else self.kind.failed


_KINDS: Final[dict[type[values.Test], EventKind]] = {
    values.Limit: RESOURCE,
    values.PidChanged: PID,
    values.Connection: CONNECTION,
    values.Echo: ICMP,
    values.Match: CONTENT,
    values.Missing: EXISTENCE,
    values.Restarts: TIMEOUT,
    values.Unreadable: DATA,
    values.WrongType: INVALID,
}
_SUBJECTS: Final = {
    "checksum": CHECKSUM,
    "fsflag": FSFLAG,
    "gid": GID,
    "permission": PERMISSION,
    "ppid": PPID,
    "size": SIZE,
    "timestamp": TIMESTAMP,
    "uid": UID,
}


def kind_of(test: values.Test) -> EventKind:
    """Return monit's event kind for the outcome of a test."""
    if isinstance(test, values.Changed | values.Unlike):
        return _SUBJECTS[test.what]
    if isinstance(test, values.Limit) and test.metric in _SUBJECTS:
        return _SUBJECTS[test.metric]
    return _KINDS[type(test)]
