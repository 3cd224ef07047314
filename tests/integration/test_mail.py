"""Tests sending email to servers that misbehave. Normal delivery is tested in test_monit_daemon.py."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from agent_shim.core.errors import BusError
from agent_shim.edges.mail import deliver
from agent_shim.supervisor.monit.control_file import Control
from tests.support.serving import serving


async def test_mail_to_a_server_with_an_endless_greeting_is_abandoned() -> None:
    """Each byte of the greeting arrives before the timeout for a single read, so the whole SMTP dialogue needs a time
    limit as well.
    """

    enough, ended = asyncio.Event(), asyncio.Event()

    async def drip(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while not enough.is_set():
                writer.write(b"2")
                await writer.drain()
                await asyncio.sleep(0.1)
        ended.set()

    async with serving(drip) as port, asyncio.timeout(60):
        servers = [("127.0.0.1", port)]
        control = Control(Path("monitrc"), recipients=["agent@local"], mail_servers=servers, mail_timeout=1)
        with pytest.raises(BusError, match=f"cannot send a mail: 127.0.0.1:{port}: .*no answer within 1 s"):
            await deliver(control, b"From: monit@here\r\n\r\nx")
        enough.set()
        await ended.wait()
