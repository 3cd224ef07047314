"""The commands' client for the control socket. It imports few modules, so that commands start quickly."""

from __future__ import annotations

import json
import os
import socket
from typing import Any

from agent_shim.core.errors import NoAgentError


def ask(path: str | os.PathLike[str], request: dict[str, Any], *, timeout: float | None = 60.0) -> Any:
    """Send a request to the agent's control socket at ``path``, and block until the reply arrives. Raises
    ``NoAgentError`` if no agent answers.
    """
    try:
        line = json.dumps(request, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError as exc:
        wrong = exc.object[exc.start : exc.end]
        raise NoAgentError(f"cannot ask the agent: an argument is not UTF-8 text, see {wrong!a}") from exc
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout)
            connection.connect(str(path))
            connection.sendall(line)
            with connection.makefile("rb") as stream:
                return json.loads(stream.readline())
    except (OSError, ValueError) as exc:
        why = (
            "the reply is not JSON" if isinstance(exc, json.JSONDecodeError) else getattr(exc, "strerror", None) or exc
        )
        raise NoAgentError(f"cannot ask the agent at {path}: {why} (is it running, and are you root?)") from exc
