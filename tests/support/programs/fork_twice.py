"""fork_twice.py PIDFILE [SECONDS]: daemonize by forking twice, write the pidfile after SECONDS, and sleep."""

import os
import sys
import time
from pathlib import Path

pidfile = Path(sys.argv[1])
if os.fork():
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
time.sleep(float(sys.argv[2]) if len(sys.argv) > 2 else 0)
pidfile.write_text(f"{os.getpid()}\n")
os.execv("/bin/sleep", ["sleep", "600"])
