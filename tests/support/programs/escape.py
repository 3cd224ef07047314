"""escape.py PIDFILE CHILDFILE [ENTRY [NAME]]: leave behind a double-forked child with its own session.

ENTRY is the child's only environment variable, and NAME (with escapes) its process name. If run as root, the child
becomes an ordinary user, because a job that stays root could do anything.
"""

import os
import sys
from pathlib import Path

pidfile, childfile, entry, name = [*sys.argv[1:], "", ""][:4]
SLEEP = ["/bin/sleep", "600"]
RENAMED = ["/usr/bin/perl", "-e", "$0 = shift; sleep 600", name.encode().decode("unicode_escape")]
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        Path(childfile).write_text(f"{os.getpid()}\n")
        if os.getuid() == 0:
            os.setresuid(65534, 65534, 65534)
        child = RENAMED if name else SLEEP
        os.execve(child[0], child, dict([entry.split("=", 1)]) if entry else {})
    os._exit(0)
os.wait()
Path(pidfile).write_text(f"{os.getpid()}\n")
os.execv(SLEEP[0], SLEEP)
