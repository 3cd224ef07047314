"""Events as mails to a mail server, as monit 5.2.5 sends them (alert.c, sendmail.c).

The Go agent listens on port 2825 for them and reads the lines ``Service:`` to ``Description:`` and the ``Message-id``
(jobsupervisor/alert_envelope.go), which become the alert of the Health Monitor.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import Iterable, Iterator
from typing import Final

from agent_shim.core import safetext
from agent_shim.core.errors import BusError
from agent_shim.edges.monit_text import VERSION
from agent_shim.supervisor.monit.control_file import Control

DEFAULT_FORMAT: Final = {
    "from": "monit@$HOST",
    "subject": "monit alert --  $EVENT $SERVICE",
    "message": "$EVENT Service $SERVICE\n\n\tDate:        $DATE\n\tAction:      $ACTION\n\tHost:        $HOST\n"
    "\tDescription: $DESCRIPTION\n\nYour faithful employee,\nmonit\n",
}
"""Where the control file has no ``set mail-format`` (alert.h)."""
MAX_REPLY_BYTES: Final = 4096


def compose(control: Control, service: str, event: str, action: str, description: str, now: float) -> bytes | None:
    """The mail for an event. None if the control file names no recipient."""
    if not control.recipients:
        return None
    host, date = socket.gethostname(), time.strftime("%a, %d %b %Y %H:%M:%S %z", time.localtime(now))
    values = {"HOST": host, "DATE": date, "SERVICE": service, "EVENT": event, "ACTION": action}
    values["DESCRIPTION"] = description

    def filled(part: str) -> str:
        text = (DEFAULT_FORMAT | control.mail_format).get(part, "")
        for name, value in values.items():
            text = text.replace(f"${name}", safetext.line(value))
        return text

    head = {
        "From": filled("from"),
        "Reply-To": filled("reply-to"),
        "To": ", ".join(control.recipients),
        "Subject": filled("subject"),
        "Date": date,
        "X-Mailer": f"monit {VERSION}",
        "Mime-Version": "1.0",
        "Content-Type": 'text/plain; charset="iso-8859-1"',
        "Content-Transfer-Encoding": "8bit",
        "Message-id": f"<{int(now)}.{secrets.randbelow(1 << 62)}@{host}>",
    }
    lines = [f"{name}: {value}" for name, value in head.items() if value]
    return "\r\n".join([*lines, "", *filled("message").split("\n"), ""]).encode("latin-1", "replace")


async def deliver(control: Control, mail: bytes) -> None:
    """Send a mail to the first server that takes a connection. Raises ``BusError``."""
    why = "the control file names no mail server"
    for host, port in control.mail_servers:
        try:
            async with asyncio.timeout(control.mail_timeout):
                reader, writer = await asyncio.open_connection(host, port, limit=MAX_REPLY_BYTES)
                try:
                    await _talk(reader, writer, _dialogue(control.recipients, mail))
                finally:
                    writer.close()
        except (OSError, TimeoutError, ValueError) as exc:
            why = f"{host}:{port}: {str(exc) or 'no answer in time'}"
        else:
            return
    raise BusError(f"cannot send a mail: {why}")


def _dialogue(recipients: Iterable[str], mail: bytes) -> Iterator[bytes]:
    sender = mail.partition(b"\r\n")[0].removeprefix(b"From: ")
    yield b"HELO " + socket.gethostname().encode()
    yield b"MAIL FROM: <%s>" % sender
    for each in recipients:
        yield b"RCPT TO: <%s>" % each.encode()
    yield b"DATA"
    yield b"\r\n".join(b"." + line if line.startswith(b".") else line for line in mail.split(b"\r\n")) + b"."


async def _talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, dialogue: Iterator[bytes]) -> None:
    """Say each line once the server has agreed to the one before. Raises ``OSError`` for a refusal."""
    await _agreed(reader)
    for line in dialogue:
        writer.write(line + b"\r\n")
        await writer.drain()
        await _agreed(reader)
    writer.write(b"QUIT\r\n")


async def _agreed(reader: asyncio.StreamReader) -> None:
    """Read a reply, which may have several lines."""
    while (line := await reader.readline())[3:4] == b"-":
        pass
    if not line[:3].isdigit() or int(line[:3]) >= 400:
        raise OSError(f"the mail server says {safetext.line(line.decode('latin-1').strip()) or 'nothing'}")
