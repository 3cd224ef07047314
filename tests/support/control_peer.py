"""Stands in for an agent on the control socket, and replies to requests with prepared values."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from agent_shim.core.paths import Paths


@contextlib.contextmanager
def answering(base: Path, reply: Callable[[dict[str, Any]], Any]) -> Iterator[None]:
    """Run a server on the control socket below ``base`` that answers each request with the result of ``reply``.

    The server runs in a thread.
    """
    place = Paths(base).control_socket
    place.parent.mkdir(parents=True)

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:  # The socket is shut down at the end of the block.
                return
            with connection, connection.makefile("rb") as lines:
                connection.sendall(msgspec.json.encode(reply(msgspec.json.decode(lines.readline()))) + b"\n")

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(place))
        server.listen()
        serving = threading.Thread(target=serve)
        serving.start()
        try:
            yield
        finally:
            server.shutdown(socket.SHUT_RDWR)
            serving.join()
