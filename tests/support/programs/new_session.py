"""new_session.py PIDFILE CHILDFILE [wipe]: start a child in a new session.

Writes this program's pid to PIDFILE and the child's pid to CHILDFILE. With ``wipe``, the child's environment
is empty.
"""

import os
import sys
from pathlib import Path

_, pidfile, childfile, *how = sys.argv
if os.fork() == 0:
    os.setsid()
    Path(childfile).write_text(f"{os.getpid()}\n")
    os.execve("/bin/sleep", ["sleep", "600"], {} if how else dict(os.environ))
Path(pidfile).write_text(f"{os.getpid()}\n")
os.execv("/bin/sleep", ["sleep", "600"])
