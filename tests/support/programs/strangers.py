"""strangers.py: fork processes with requested pids, and report the signals that these processes receive.

Must run as root in a PID namespace. Commands arrive on standard input, one per line. ``take PID HOW`` is answered with
the pid of the process that was forked, or with 0 if PID is not free. HOW is ``plain``, ``leader`` (the process leads
its own session) or ``member`` (PID belonged to a session leader which has exited, and the process is a member of this
session). ``end PID`` kills a process, and is answered with a line that lists the signals which the process had
received.
"""

import ctypes
import os
import signal
import sys
import time

PR_SET_CHILD_SUBREAPER = 36
TIMEOUT_S = 0.5
told: dict[int, int] = {}


def take(wanted: int, how: str) -> int:
    """Fork until a child has the pid ``wanted``. Return the pid of the process that remains, or 0 after a timeout.

    If ``how`` is ``member``, the child forks once more and exits, so that the child's own child remains.
    """
    give_up_at = time.monotonic() + TIMEOUT_S
    while time.monotonic() < give_up_at:
        reading, writing = os.pipe()
        with open("/proc/sys/kernel/ns_last_pid", "w") as last:
            last.write(str(wanted - 1))
        pid = os.fork()
        if pid == 0:
            if os.getpid() != wanted:
                os._exit(0)
            os.close(reading)
            if how != "plain":
                os.setsid()
            if how == "member" and os.fork():
                os._exit(0)
            stay(writing)
        os.close(writing)
        if pid != wanted:
            os.close(reading)
            os.waitpid(pid, 0)
            continue
        pid = int(os.read(reading, 16))
        if how == "member":
            os.waitpid(wanted, 0)
        told[pid] = reading
        return pid
    return 0


def stay(writing: int) -> None:
    """Write this process's pid to the pipe, then the number of each signal that this process receives."""
    every = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    signal.pthread_sigmask(signal.SIG_BLOCK, every)
    os.write(writing, b"%d\n" % os.getpid())
    while True:
        os.write(writing, b"%d " % signal.sigwait(every))


def end(pid: int) -> str:
    """Kill the process if it is still running. Return the signals that it had received, followed by its wait status if
    it had already exited.
    """
    dead, status = os.waitpid(pid, os.WNOHANG)
    if not dead:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    got = os.read(told[pid], 4096).decode() + (str(status) if dead else "")
    os.close(told.pop(pid))
    return got


ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
for line in sys.stdin:
    verb, number, *how = line.split()
    answer = take(int(number), how[0]) if verb == "take" else end(int(number))
    sys.stdout.write(f"{answer}\n")
    sys.stdout.flush()
