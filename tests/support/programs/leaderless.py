"""leaderless.py PIDFILE: exit the main thread and continue in another thread.

The kernel reports such a process as a zombie without memory, files and environment, although it is running.
"""

import ctypes
import os
import sys
import threading
import time
from pathlib import Path

EXIT_OF_A_THREAD = {"x86_64": 60}.get(os.uname().machine, 93)
main = os.getpid()


def go_on() -> None:
    while ") Z " not in Path(f"/proc/{main}/stat").read_text():
        time.sleep(0.01)
    Path(sys.argv[1]).write_text(f"{main}\n")
    time.sleep(600)


threading.Thread(target=go_on).start()
ctypes.CDLL(None).syscall(EXIT_OF_A_THREAD, 0)
