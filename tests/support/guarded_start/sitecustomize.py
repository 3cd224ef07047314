"""Makes an agent report callbacks that block its event loop (``tests.support.loop_guard``). Python imports this module
at startup if this directory is in ``PYTHONPATH``.
"""

import os
import sys

if "run" in sys.orig_argv and (reports := os.environ.pop("AGENT_SHIM_LOOP_REPORTS", "")):
    from pathlib import Path  # Imported late, because this doubles Python's start time.

    from tests.support import loop_guard

    loop_guard.install(Path(reports))
