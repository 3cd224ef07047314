"""Imported at the start of each Python program whose ``PYTHONPATH`` has this directory: guards the loop of an agent."""

import os
import sys
from pathlib import Path

if "run" in sys.orig_argv and (reports := os.environ.pop("AGENT_SHIM_LOOP_REPORTS", "")):
    from tests.support import loop_guard

    loop_guard.install(Path(reports))
