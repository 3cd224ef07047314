"""The kernel timer of the watchdog."""

from __future__ import annotations

import faulthandler
import signal
from pathlib import Path

from agent_shim.host import watchdog


def test_the_timer_runs_once_there_is_a_place_for_its_dump(tmp_path: Path) -> None:
    """A hold within the first step of the thread once lasted for ever."""
    dog = watchdog.Watchdog()
    try:
        dog.remember(tmp_path)

        assert signal.getitimer(signal.ITIMER_VIRTUAL)[0] > 0
    finally:
        dog.stop()
        dog.disown()
        faulthandler.unregister(signal.SIGVTALRM)
        if dog._trace is not None:
            dog._trace.close()
