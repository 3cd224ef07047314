"""leaderless.py PIDFILE [HOW]: end the main thread and continue in another thread.

If HOW is ``daemon``, fork twice first. If HOW is ``wipe``, also empty the environment and, if run as root, become an
ordinary user, because a job that stays root could do anything.

The kernel reports such a process as a zombie without memory, files and environment, although it is running.
"""

import ctypes
import os
import sys
import threading
import time
from pathlib import Path

EXIT_OF_A_THREAD = {"x86_64": 60}.get(os.uname().machine, 93)
pidfile, how = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
if how == "wipe":
    os.execve(sys.executable, [sys.executable, *sys.argv[:2], "wiped"], {"PATH": "/bin:/usr/bin"})
if how in ("daemon", "wiped"):
    for _ in range(2):
        if os.fork():
            os._exit(0)
        os.setsid()
main = os.getpid()
out = pidfile.open("w")
if os.getuid() == 0 and how == "wiped":
    os.setresuid(65534, 65534, 65534)
ballast = b"x" * (64 << 20)


def go_on() -> None:
    while ") Z " not in Path(f"/proc/{main}/stat").read_text():
        time.sleep(0.01)
    print(main, file=out, flush=True)
    time.sleep(600)


threading.Thread(target=go_on).start()
ctypes.CDLL(None).syscall(EXIT_OF_A_THREAD, 0)
