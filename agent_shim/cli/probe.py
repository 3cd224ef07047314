"""``agent-shim probe live|ready``: one request over the control socket, with minimal imports.

A pod may probe every second, and an interpreter is expensive: this imports neither the daemon nor other commands.
"""

from __future__ import annotations

import socket
import sys

SOCKET = "bosh/agent_shim.sock"
"""``paths.Paths.control_socket`` below the base. A test compares both."""
ANSWER_TIMEOUT_S = 10.0
"""Timeout of the answer: an event loop blocked for longer counts as dead."""
NO, NO_AGENT = 1, 69


def read(words: list[str]) -> tuple[str, str] | None:
    """Kind and base of a probe in the usual form of manifests. None for any other form, left to the full parser."""
    match words:
        case ["live" | "ready" as kind]:
            return kind, "/var/vcap"
        case ["live" | "ready" as kind, "-b", base]:
            return kind, base
    return None


def main(question: tuple[str, str]) -> int:
    """Print the reason. Return 0 for yes, 1 for no, 69 without an answer."""
    kind, base = question
    path = f"{base}/{SOCKET}"
    try:
        with socket.socket(socket.AF_UNIX) as asked:
            asked.settimeout(ANSWER_TIMEOUT_S)
            asked.connect(path)
            asked.sendall(b'{"command":"probe","kind":"%b"}\n' % kind.encode())
            with asked.makefile("rb") as stream:
                reply = stream.readline()
        import json

        answer = json.loads(reply)
    except (OSError, ValueError) as exc:
        why = getattr(exc, "strerror", None) or exc
        hint = "(is it running, and are you root or its user?)"
        sys.stderr.write(f"agent-shim: cannot ask the agent at {path}: {why} {hint}\n")
        return NO_AGENT
    sys.stdout.write(f"{answer['reason']}\n")
    return 0 if answer["ok"] else NO
