"""Defines values that describe how a service lost its process, or that a checked path is missing."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

KINDS: Final = ("success", "error", "signal", "unknown")
"""Kinds of exits: exit code 0, another exit code, a signal, and an exit that the agent did not observe."""


class Code(msgspec.Struct, frozen=True):
    """The process exited with this code."""

    code: int

    def __str__(self) -> str:
        return f"exit {self.code}"

    @property
    def kind(self) -> str:
        return "error" if self.code else "success"


class Signal(msgspec.Struct, frozen=True):
    """A signal killed the process."""

    number: signal.Signals
    kind = "signal"

    def __str__(self) -> str:
        return self.number.name


class Unknown(msgspec.Struct, frozen=True):
    """The process has exited, but the agent did not observe how."""

    kind = "unknown"

    def __str__(self) -> str:
        return "unknown"


class NoPid(msgspec.Struct, frozen=True):
    """The pidfile no longer names a process. The process itself may still be alive."""

    def __str__(self) -> str:
        return "its pidfile names no process"


class PathMissing(msgspec.Struct, frozen=True):
    """The path of a check that has no process is missing."""

    path: Path | None

    def __str__(self) -> str:
        return f"{self.path} is missing"


Exit: TypeAlias = Code | Signal | Unknown
Ending: TypeAlias = Exit | NoPid | PathMissing


def of_status(status: int | None) -> Exit:
    """Convert a status to an ``Exit``. The status is an exit code, 128+N after signal N, or None if it is unknown."""
    if status is None:
        return Unknown()
    if status > 128 and status - 128 in set(signal.Signals):
        return Signal(signal.Signals(status - 128))
    return Code(status)
