"""Statements of a monit control file without effect: ``set`` and ``alert``. Pure.

They concern the monit daemon and its mails, which the agent replaces. No known release has a ``set``: any words of it
are taken. An ``alert`` is parsed to its end, because an option may follow it.
"""

from __future__ import annotations

from agent_shim.supervisor.monit.reader import Reader


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
        _braces(reader, "events")
    if reader.take("mail-format"):
        _braces(reader, "the parts of a mail")
    if reader.take("reminder"):
        reader.number("a number of cycles")
        reader.take("cycle")


def _braces(reader: Reader, content: str) -> None:
    """Parse any words in braces."""
    expected = f"'{{', {content} and '}}'"
    reader.need(expected, "{")
    while not reader.take("}"):
        if reader.kind in ("END", "BAD", "{"):
            raise reader.error(expected)
        reader.skip()
