"""Client of the control socket for commands; imports as few modules as possible to start quickly."""

from __future__ import annotations

import json
import socket

from agent_shim.core.errors import NoAgentError

TYPE_CHECKING = False  # without loading ``typing``
if TYPE_CHECKING:
    import os
    from typing import Any


def ask(path: str | os.PathLike[str], request: dict[str, Any], *, timeout: float | None = 60.0) -> Any:
    """Send a request to the agent at ``path`` and wait for its reply; raises ``NoAgentError`` without one. Blocks."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout)
            connection.connect(str(path))
            connection.sendall(json.dumps(request).encode() + b"\n")
            with connection.makefile("rb") as stream:
                reply = stream.readline()
        return json.loads(reply)
    except (OSError, ValueError) as exc:
        raise NoAgentError(f"cannot ask the agent at {path}: {exc} (is it running, and are you root?)") from exc
