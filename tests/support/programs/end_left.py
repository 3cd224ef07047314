"""``end_left.py BASE PID``: wait until the pytest worker PID has exited for any reason, then kill the processes that it
has left behind.

The worker's fixtures do not run if it is killed, so programs started by its tests would keep running. They are
recognized by BASE, the tests' directory, in their command line or environment.
"""

import contextlib
import os
import select
import signal
import socket
import sys
import time

WITHIN_S = 10
MAX_ENVIRON_BYTES = 1 << 20


def end_left(base: str) -> list[int]:
    """Kill the descendants of keepers below ``base``, and all processes with ``base`` in their command line or
    environment.

    Return the pids that are still running after 10 s.
    """
    for directory, _, _ in os.walk(base):
        if directory.endswith("/bosh/keepers"):
            end_kept(directory)
    give_up_at = time.monotonic() + WITHIN_S
    while (left := _processes_of(os.fsencode(base) + b"/")) and time.monotonic() < give_up_at:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    return left


def end_kept(directory: str) -> None:
    """Kill all descendants of the keepers whose sockets are in a directory, and wait until the keepers have exited."""
    for name in os.listdir(directory):  # noqa: PTH208 - starts faster without pathlib
        place = os.open(f"{directory}/{name}", os.O_PATH)
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as keeper:
            keeper.settimeout(WITHIN_S)
            keeper.connect(f"/proc/self/fd/{place}")
            keeper.send(b"release")
            keeper.send(b"kill")
            while keeper.recv(4096):
                pass
        os.close(place)


def _processes_of(base: bytes) -> list[int]:
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):  # noqa: PTH208 - starts faster without pathlib
        with (
            contextlib.suppress(OSError),
            open(f"/proc/{name}/cmdline", "rb") as command,
            open(f"/proc/{name}/environ", "rb") as environ,
        ):
            is_left = base in command.read(MAX_ENVIRON_BYTES) or base in environ.read(MAX_ENVIRON_BYTES)
            if is_left and int(name) != os.getpid():
                found.append(int(name))
    return found


if __name__ == "__main__":
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(int(sys.argv[2]))], [], [])
    end_left(sys.argv[1])
