"""Restarts monit 5.2.5 whenever it exits, as runit does, and kills it when the Go agent waits for monit to reload."""

from __future__ import annotations

import subprocess
import time
from typing import Final

from tools.comparison.life import RELOADS, SCRATCH, VCAP

LOOK_S: Final = 0.3
LOG: Final = SCRATCH / "agent.log"


def main() -> None:
    asked = seen = offset = 0
    while True:
        monit = subprocess.Popen(["nice", "-n", "-10", VCAP / "bosh/bin/monit", "-I", "-c", VCAP / "bosh/etc/monitrc"])
        while monit.poll() is None:
            if LOG.exists():
                with LOG.open("rb") as log:
                    log.seek(offset)
                    lines = log.read().rpartition(b"\n")[0]
                offset += len(lines)
                asked += lines.count(RELOADS.encode())
            if asked > seen:
                monit.kill()
            seen = asked
            time.sleep(LOOK_S)
        time.sleep(0.2)


if __name__ == "__main__":
    main()
