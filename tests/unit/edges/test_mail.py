"""Tests emails about events, which have the format of monit 5.2.5. ``test_monit_daemon.py`` tests their delivery."""

from __future__ import annotations

import socket
from pathlib import Path

from agent_shim.edges.mail import compose
from agent_shim.supervisor.monit.control_file import Control

FORMAT = {
    "from": "monit@localhost",
    "subject": "Monit Alert",
    "message": "Service: $SERVICE\n  Event: $EVENT\n  Action: $ACTION\n  Date: $DATE\n  Description: $DESCRIPTION",
}


def lines(**options: object) -> list[str]:
    control = Control(Path("monitrc"), recipients=["agent@local"], **options)  # type: ignore[arg-type]
    mail = compose(control, "web", "Does not exist", "restart", "process is\nnot running", (), 0.0)
    assert mail is not None
    return mail.decode().split("\r\n")


def test_email_has_the_format_in_the_stemcell_control_file() -> None:
    """A line break in a job's output must not add a line to the email's headers or body."""
    found = lines(mail_format=FORMAT)
    head, body = found[: found.index("")], found[found.index("") + 1 :]

    assert head[:3] == ["From: monit@localhost", "To: agent@local", "Subject: Monit Alert"]
    assert [line for line in head if line.startswith("Message-id: <") and line.endswith(f"@{socket.gethostname()}>")]
    assert [line.strip().partition(":")[0] for line in body[:5]] == [
        "Service",
        "Event",
        "Action",
        "Date",
        "Description",
    ]
    assert body[4].endswith(r"process is\u000anot running")
    assert body[3].strip().startswith("Date: Thu, 01 Jan 1970 ")


def test_email_has_a_default_sender_and_subject() -> None:
    assert f"From: monit@{socket.gethostname()}" in lines()
    assert "Subject: monit alert --  Does not exist web" in lines()


def test_email_is_not_sent_without_a_recipient() -> None:
    assert compose(Control(Path("monitrc")), "web", "Exists", "alert", "", (), 0.0) is None
