"""Finds ports of this machine on which nothing listens."""

from __future__ import annotations

import contextlib
import random
import socket


def free_port() -> int:
    """Return a free port below the ephemeral range.

    Outgoing connections never use such a port, so it stays free while a server is restarted.
    """
    while True:
        port = random.randrange(15_000, 30_000)
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            return port


def free_address() -> str:
    """Return an address of this machine with a free port."""
    return f"127.0.0.1:{free_port()}"
