"""Runs chaos cases in their own PID namespace so that a misdirected signal is recorded and cannot reach the host.

When run as a program, this module is PID 1 of that namespace. ``namespaces.py SIGNALS COMMAND ...`` runs the command,
reaps orphans, appends the number of each signal that it receives to the file ``SIGNALS`` (one per line), and exits with
the command's exit code.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Final

INSIDE: Final = "SHIM_CHAOS_SIGNALS"
"""Environment variable with the path of the file in which PID 1 records signals. It is set only in such a namespace."""
FATAL: Final = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def enter(module: str, arguments: Sequence[str], *, network: bool = False) -> None:
    """Replace this process with ``python -m MODULE ARGUMENTS`` in new mount and PID namespaces.

    Do nothing if this process is not root, or already runs in such namespaces.
    """
    if os.geteuid() != 0 or INSIDE in os.environ:
        return
    descriptor, signals = tempfile.mkstemp(prefix="agent-shim-chaos-signals-")
    os.close(descriptor)
    os.environ[INSIDE] = signals
    kinds = ["--mount", "--pid", *(["--net"] if network else [])]
    first = [sys.executable, __file__, signals, sys.executable, "-m", module, *arguments]
    if network:
        first = ["sh", "-c", 'ip link set lo up && exec "$@"', "sh", *first]
    os.execvp("unshare", ["unshare", *kinds, "--fork", "--mount-proc", "--kill-child", "--", *first])


def signals_to_init() -> list[int]:
    """Return the signals that PID 1 has received. SIGKILL is never among them, because the kernel discards it if the
    sender is inside the namespace.
    """
    return [int(line) for line in Path(os.environ[INSIDE]).read_text().split()]


def main(signals: str, command: list[str]) -> int:
    """Act as PID 1. Return the exit code of ``command``, or 128 + N if signal N killed it."""

    def record(number: int, _frame: FrameType | None) -> None:
        with Path(signals).open("a") as file:
            file.write(f"{number}\n")

    for number in FATAL:
        signal.signal(number, record)
    child = os.posix_spawnp(command[0], command, os.environ)
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            Path(signals).unlink(missing_ok=True)
            return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
