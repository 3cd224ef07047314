"""Kinds of monit events, with its words and status bits (monit 5.2.5 event.c). Pure."""

from __future__ import annotations

from typing import Final

import msgspec

from agent_shim.supervisor.monit.ast import Connection, Limit, Missing, PidChanged, Restarts, Test


class Kind(msgspec.Struct, frozen=True):
    """An event kind; ``bit`` is its ``status`` bit in the XML, the texts are its names in alerts."""

    bit: int
    failed: str
    succeeded: str


CONNECTION: Final = Kind(0x20, "Connection failed", "Connection succeeded")
DATA: Final = Kind(0x800, "Data access error", "Data access succeeded")
EXECUTION: Final = Kind(0x1000, "Execution failed", "Execution succeeded")
EXISTENCE: Final = Kind(0x200, "Does not exist", "Exists")
PID: Final = Kind(0x40000, "PID failed", "PID succeeded")
RESOURCE: Final = Kind(0x2, "Resource limit matched", "Resource limit succeeded")
TIMEOUT: Final = Kind(0x4, "Timeout", "Timeout recovery")

ORDER: Final = (CONNECTION, DATA, EXECUTION, EXISTENCE, PID, RESOURCE, TIMEOUT)
"""Order of monit's table: the first of several faults is reported."""

BITS: Final = {kind.failed: kind.bit for kind in ORDER}


class Complaint(msgspec.Struct, frozen=True):
    """A failed rule of a running service."""

    kind: Kind
    text: str


_KINDS: Final = {Limit: RESOURCE, PidChanged: PID, Connection: CONNECTION, Missing: EXISTENCE, Restarts: TIMEOUT}


def kind_of(test: Test) -> Kind:
    """Return monit's event kind for the outcome of a test."""
    return _KINDS[type(test)]
