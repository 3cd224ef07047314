"""late_session.py PIDFILE GO CHILDFILE: a daemon that writes its pidfile, and starts a new session when the file GO
exists.

After that, the daemon starts a child with an empty environment. nginx workers are similar, because they overwrite their
environment with their process title.
"""

import os
import sys
import time
from pathlib import Path

pidfile, go, childfile = map(Path, sys.argv[1:])
if os.fork():
    os._exit(0)
pidfile.write_text(f"{os.getpid()}\n")
while not go.exists():
    time.sleep(0.005)
os.setsid()
if os.fork() == 0:
    childfile.write_text(f"{os.getpid()}\n")
    os.execve("/bin/sleep", ["sleep", "600"], {})
time.sleep(600)
