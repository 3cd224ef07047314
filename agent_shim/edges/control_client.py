"""The asking end of the control socket, for commands, which must be quick to start: as few modules as can be."""

from __future__ import annotations

import json
import socket

from agent_shim.core.errors import NoAgentError

TYPE_CHECKING = False  # without loading ``typing``
if TYPE_CHECKING:
    import os
    from typing import Any


def ask(path: str | os.PathLike[str], request: dict[str, Any], *, timeout: float | None = 60.0) -> Any:
    """Ask the agent behind ``path``, blocking; raises ``NoAgentError`` if none answers."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asked:
            asked.settimeout(timeout)
            asked.connect(str(path))
            asked.sendall(json.dumps(request).encode() + b"\n")
            with asked.makefile("rb") as stream:
                reply = stream.readline()
        return json.loads(reply)
    except (OSError, ValueError) as exc:
        raise NoAgentError(f"cannot ask the agent at {path}: {exc} (is it running, and are you root?)") from exc
