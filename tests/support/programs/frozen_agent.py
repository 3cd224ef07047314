"""``frozen_agent.py MODE run …``: an agent whose event loop blocks when a pidfile is a named pipe.

The watchdog's timeouts are short. MODE determines what blocks the loop: a system call, Python code, or C code that
holds the GIL.
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

from agent_shim.cli import main
from agent_shim.host import watchdog
from agent_shim.supervisor.ownership import process_record

MODE = sys.argv.pop(1)
watchdog.STEP_S = 0.2  # type: ignore[misc]
watchdog.BEAT_S = 0.4  # type: ignore[misc]
watchdog.REPORT_AFTER_S = 2.6 if MODE == "patient" else 0.8  # type: ignore[misc]
watchdog.END_AFTER_S = {"slow": 60.0, "holding": 1.0}.get(MODE, 3.0)  # type: ignore[misc]
careful = process_record.read


def naive(path: Path | str | None) -> process_record.Pidfile | None:
    if path is not None and Path(path).is_fifo():
        match MODE:
            case "blocked":
                Path(path).read_text()
            case "computing":
                while True:
                    pass
            case "holding":
                re.match("(a+)+$", "a" * 60 + "b")
            case "slow":
                time.sleep(2.5)
    return careful(path)


process_record.read = naive

if __name__ == "__main__":
    sys.exit(main.main())
