"""The asking end of the control socket, for commands, which must be quick to start: standard library only."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

from agent_shim.errors import NoAgentError


def ask(path: Path, request: dict[str, Any], *, timeout: float | None = 60.0) -> Any:
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
