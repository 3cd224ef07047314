"""as_process_one.py ARGUMENT...: an agent that takes itself for process 1 of a container when a signal comes."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

from agent_shim.cli import main as cli
from agent_shim.daemon import main

if __name__ == "__main__":
    vars(main)["os"] = SimpleNamespace(**vars(os) | {"getpid": lambda: 1})
    sys.exit(cli.main())
