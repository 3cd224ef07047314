"""An agent that believes it is PID 1 and therefore stops the container when it receives a signal."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any, cast

from agent_shim.cli import main as cli
from agent_shim.daemon import main

if __name__ == "__main__":
    cast("Any", main).os = SimpleNamespace(**{**vars(os), "getpid": lambda: 1})
    sys.exit(cli.main())
