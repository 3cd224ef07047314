"""escape.py PIDFILE CHILDFILE [ENTRY]: leave a child that forked twice, in its own session, with ENTRY as environment.

As root the child becomes an ordinary user: a job that stays root can do anything.
"""

import os
import sys
from pathlib import Path

_, pidfile, childfile, *entries = sys.argv
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        Path(childfile).write_text(f"{os.getpid()}\n")
        if os.getuid() == 0:
            os.setresuid(65534, 65534, 65534)
        os.execve("/bin/sleep", ["sleep", "600"], dict(entry.split("=", 1) for entry in entries))
    os._exit(0)
os.wait()
Path(pidfile).write_text(f"{os.getpid()}\n")
os.execv("/bin/sleep", ["sleep", "600"])
