"""Client of the control socket for commands; imports as few modules as possible to start quickly."""

from __future__ import annotations

# The parts in C of socket and json: the modules around them load regular expressions, enumerations and selectors, which
# takes longer than the start of an interpreter.
import _json
import _socket

from agent_shim.core.errors import NoAgentError

TYPE_CHECKING = False  # without loading ``typing``
if TYPE_CHECKING:
    import os
    from typing import Any

CHUNK_BYTES = 64 * 1024


class _Rules:
    """Attributes that the scanner reads, with the values of ``json.loads`` without options."""

    strict = True
    object_hook = None
    object_pairs_hook = None
    array_hook = None
    parse_float = float
    parse_int = int
    parse_constant = float


_scan = _json.make_scanner(_Rules)  # type: ignore[arg-type]


def ask(path: str | os.PathLike[str], request: dict[str, Any], *, timeout: float | None = 60.0) -> Any:
    """Send a request to the agent at ``path`` and wait for its reply; raises ``NoAgentError`` without one. Blocks."""
    try:
        connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        try:
            connection.settimeout(timeout)
            connection.connect(str(path))
            connection.sendall(encoded(request).encode() + b"\n")
            return _scan(_line(connection).decode(), 0)[0]
        finally:
            connection.close()
    except (OSError, ValueError, StopIteration) as exc:
        why = "the reply is not JSON" if isinstance(exc, StopIteration) else exc
        raise NoAgentError(f"cannot ask the agent at {path}: {why} (is it running, and are you root?)") from exc


def encoded(value: Any) -> str:
    """Encode as JSON."""
    match value:
        case None | bool():
            return {None: "null", True: "true", False: "false"}[value]
        case str():
            return _json.encode_basestring_ascii(value)
        case int() | float():
            return repr(value)
        case dict():
            return "{" + ",".join(f"{encoded(key)}:{encoded(each)}" for key, each in value.items()) + "}"
        case list() | tuple():
            return "[" + ",".join(map(encoded, value)) + "]"
    raise ValueError(f"{type(value).__name__} is no part of a request")


def _line(connection: _socket.socket) -> bytes:
    """Receive up to the first line break or the end."""
    chunks = []
    while chunk := connection.recv(CHUNK_BYTES):
        head, found, _ = chunk.partition(b"\n")
        chunks.append(head)
        if found:
            break
    return b"".join(chunks)
