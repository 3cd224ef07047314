"""``agent-shim probe live|ready``, implemented with minimal imports.

A pod may be probed every second, and starting an interpreter is expensive, so this module imports neither the daemon
nor other commands.

``live`` checks whether the agent's process is alive, without asking the agent itself. An agent that is slow, stopped or
starved of CPU time is still alive, and restarting its container would kill all jobs. ``ready`` does ask the agent.
"""

from __future__ import annotations

import fcntl
import socket
import sys

SOCKET = "bosh/agent_shim.sock"
"""The path of the control socket (``paths.Paths.control_socket``), relative to the base. It is repeated here to avoid
the import, and a test checks that both definitions are equal.
"""
LOCK = "bosh/agent_shim.lock"
"""The path of the agent lock (``paths.Paths.agent_lock``), relative to the base. An agent keeps this file locked for as
long as it runs (``volume_lease``).
"""
ANSWER_TIMEOUT_S = 10.0
NO, NO_AGENT = 1, 69


def read(words: list[str]) -> tuple[str, str] | None:
    """Parse a probe's command line, and return the probe's kind and base directory.

    Only the form that is usual in pod manifests is accepted. For any other form, return None, so that the full parser
    handles it.
    """
    match words:
        case ["live" | "ready" as kind]:
            return kind, "/var/vcap"
        case ["live" | "ready" as kind, "-b", base]:
            return kind, base
    return None


def main(question: tuple[str, str]) -> int:
    """Run the probe ``question`` (kind and base directory) and print the reason for the result. Return 0 on success, 1
    on failure, and 69 if no agent is running or the agent does not answer.
    """
    kind, base = question
    return _live(base) if kind == "live" else _ready(base)


def _live(base: str) -> int:
    """Check that an agent is running, which means that it has locked its lock file."""
    path = f"{base}/{LOCK}"
    why = "no process has locked it"
    try:
        with open(path, "rb") as file:
            # If no agent is running, the probe gets the lock and releases it immediately. An agent that starts at that
            # moment finds the file locked, exits and is restarted.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.stdout.write("alive\n")
        return 0
    except OSError as exc:
        why = exc.strerror or str(exc)
    return _no_agent(f"find the agent by {path}: {why}")


def _ready(base: str) -> int:
    """Ask the agent for the result of ``/readyz``. The agent replies on its control socket, so the HTTP port may be
    closed.
    """
    path = f"{base}/{SOCKET}"
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(ANSWER_TIMEOUT_S)
            connection.connect(path)
            connection.sendall(b'{"command":"probe","kind":"ready"}\n')
            with connection.makefile("rb") as stream:
                reply = stream.readline()
        import json

        answer = json.loads(reply)
    except (OSError, ValueError) as exc:
        return _no_agent(f"ask the agent at {path}: {getattr(exc, 'strerror', None) or exc}")
    sys.stdout.write(f"{answer['reason']}\n")
    return 0 if answer["ok"] else NO


def _no_agent(what: str) -> int:
    """Print that no agent was found, and return the exit code for that."""
    sys.stderr.write(f"agent-shim: cannot {what} (is it running, and are you root or its user?)\n")
    return NO_AGENT
