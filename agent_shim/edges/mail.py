"""Sends events as emails through a mail server, as monit 5.2.5 does (alert.c, sendmail.c).

The Go agent accepts such emails on port 2825 and creates an alert for the Health Monitor from the lines ``Service:`` to
``Description:`` and the ``Message-id`` (jobsupervisor/alert_envelope.go).
"""

from __future__ import annotations

import secrets
import socket
import time
from functools import partial
from typing import Final

from agent_shim.core import safetext
from agent_shim.core.errors import BusError
from agent_shim.edges.monit_text import VERSION
from agent_shim.host import blocking
from agent_shim.supervisor.monit.control_file import Control

DEFAULT_FORMAT: Final = {
    "from": "monit@$HOST",
    "subject": "monit alert --  $EVENT $SERVICE",
    "message": "Service: $SERVICE\nEvent: $EVENT\nAction: $ACTION\nDate: $DATE\nHost: $HOST\nDescription: $DESCRIPTION",
}
"""The format if the control file has no ``set mail-format``: monit's sender and subject (alert.h), and the lines that
the Go agent reads.
"""


def compose(
    control: Control, service: str, event: str, action: str, description: str, _ips: object, now: float
) -> bytes | None:
    """Return the email for an event, or None if the control file names no recipient. The parameters after ``control``
    are those of ``alerts.alert_of``, because ``alerts.Alerts`` can call either function.
    """
    if not control.recipients:
        return None
    host, date = socket.gethostname(), time.strftime("%a, %d %b %Y %H:%M:%S %z", time.localtime(now))
    values = {"HOST": host, "DATE": date, "SERVICE": service, "EVENT": event, "ACTION": action}
    form = DEFAULT_FORMAT | control.mail_format
    # The description is inserted last, so that names such as $HOST in it are not replaced.
    for name, value in (values | {"DESCRIPTION": description}).items():
        form = {part: text.replace(f"${name}", safetext.line(value)) for part, text in form.items()}
    head = {
        "From": form["from"],
        "Reply-To": form.get("reply-to"),
        "To": ", ".join(control.recipients),
        "Subject": form["subject"],
        "Date": date,
        "X-Mailer": f"monit {VERSION}",
        "Mime-Version": "1.0",
        "Content-Type": 'text/plain; charset="iso-8859-1"',
        "Content-Transfer-Encoding": "8bit",
        "Message-id": f"<{int(now)}.{secrets.randbelow(1 << 62)}@{host}>",
    }
    lines = [f"{name}: {value}" for name, value in head.items() if value]
    return "\r\n".join([*lines, "", *form["message"].split("\n"), ""]).encode("latin-1", "replace")


async def deliver(control: Control, mail: bytes) -> None:
    """Send an email to the first server that accepts it. Raises ``BusError``."""
    why = "the control file names no mail server"
    for host, port in control.mail_servers:
        try:
            send = partial(_send, control, host, port, mail)
            await blocking.call(f"mail server {host}:{port}", send, timeout=control.mail_timeout)
        except (OSError, ValueError) as exc:  # a non-ASCII address raises ValueError
            why = f"{host}:{port}: {safetext.line(str(exc))}"
        else:
            return
    raise BusError(f"cannot send a mail: {why}")


def _send(control: Control, host: str, port: int, mail: bytes) -> None:
    """Send an email to one server. This function blocks. Raises ``OSError`` or ``ValueError``."""
    import smtplib

    # The first line is the From header.
    sender = mail.partition(b"\r\n")[0].removeprefix(b"From: ").decode("latin-1")
    with smtplib.SMTP(host, port, socket.gethostname(), control.mail_timeout) as server:
        server.helo()  # like monit, send HELO instead of EHLO, because some servers do not support ESMTP
        server.sendmail(sender, control.recipients, mail)
