"""Statements of a monit control file without effect: ``set`` and ``alert``. Pure.

They concern the monit daemon and its mails, which the agent replaces. No known release has a ``set``: any words of it
are taken. An ``alert`` is parsed strictly, because an option may follow it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from agent_shim.supervisor.monit.reader import Reader

EVENTS: Final = (
    "action",
    "checksum",
    "connection",
    "content",
    "data",
    "exec",
    "fsflag",
    "gid",
    "icmp",
    "instance",
    "invalid",
    "nonexist",
    "permission",
    "pid",
    "ppid",
    "resource",
    "size",
    "timeout",
    "timestamp",
    "uid",
)
"""Events of mail alerts."""

UNITS: Final[Mapping[str, int]] = {"b": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30}


def read_set(reader: Reader) -> None:
    """Skip a ``set`` statement, which ends before the next ``set`` or ``check``."""
    reader.skip()
    first = reader.next
    while reader.kind not in ("set", "END", "BAD") and not reader.kind.startswith("check "):
        reader.skip()
    if reader.kind == "BAD" or reader.next is first:
        raise reader.error("the words of a 'set'")


def read_alert(reader: Reader) -> None:
    """Parse ``alert ADDRESS [[not] { EVENT... }] [mail-format {...}] [reminder N cycles]``, or ``noalert ADDRESS``."""
    is_silent = reader.skip().kind == "noalert"
    reader.need("a mail address", "MAIL")
    if is_silent:
        return
    if reader.take("not") or reader.kind == "{":
        reader.need("'{' and events", "{")
        _until_brace(reader, f"an event ({', '.join(EVENTS)})", *EVENTS)
    if reader.take("mail-format"):
        _mail_format(reader)
    if reader.take("reminder"):
        reader.number("a number of cycles")
        reader.take("cycle")


def _mail_format(reader: Reader) -> None:
    reader.need("'{'", "{")
    _until_brace(reader, "'from:', 'reply-to:', 'subject:' or 'message:'", "FROM", "REPLY-TO", "SUBJECT", "MESSAGE")


def _until_brace(reader: Reader, expected: str, *kinds: str) -> None:
    """Parse one or more words of these kinds, then the closing brace."""
    reader.need(expected, *kinds)
    while not reader.take("}"):
        reader.need(f"{expected} or '}}'", *kinds)
