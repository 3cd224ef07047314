"""Guards the event loop of an agent. Python imports this when it starts with this directory in ``PYTHONPATH``."""

import os
import sys
from pathlib import Path

if "run" in sys.orig_argv and (reports := os.environ.pop("AGENT_SHIM_LOOP_REPORTS", "")):
    from tests.support import loop_guard

    loop_guard.install(Path(reports))
