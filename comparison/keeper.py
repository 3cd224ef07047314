"""Keeps monit 5.2.5 running, as runit does, and kills it when the Go agent waits for a reload."""

from __future__ import annotations

import subprocess
import time
from typing import Final

from comparison.life import RELOADS, SCRATCH, VCAP

LOG: Final = SCRATCH / "agent.log"


def main() -> None:
    seen = 0
    while True:
        monit = subprocess.Popen(["nice", "-n", "-10", VCAP / "bosh/bin/monit", "-I", "-c", VCAP / "bosh/etc/monitrc"])
        while monit.poll() is None:
            asked = LOG.read_text(errors="replace").count(RELOADS) if LOG.exists() else 0
            if asked > seen:
                monit.kill()
            seen = asked
            time.sleep(0.1)
        time.sleep(0.2)


if __name__ == "__main__":
    main()
