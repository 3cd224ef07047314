"""Tests the watchdog's reports and timer. ``integration/test_watchdog.py`` runs agents with a blocked event loop."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from agent_shim.host import watchdog
from agent_shim.host.watchdog import reading, watching
from tests.support.waiting import until

PERIOD_S = 0.01


@pytest.fixture(autouse=True)
def fast_watchdog(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Speed up the watchdog, and keep it from killing the test process."""
    monkeypatch.setattr(watchdog, "BEAT_S", PERIOD_S)
    monkeypatch.setattr(watchdog, "REPORT_AFTER_S", 0.03)
    monkeypatch.setattr(watchdog, "END_AFTER_S", 3600.0)
    yield
    faulthandler.unregister(signal.SIGVTALRM)
    faulthandler.cancel_dump_traceback_later()


def block_until(holds: Callable[[], object]) -> None:
    """Wait like ``until``, but block the event loop."""
    give_up_at = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < give_up_at
        time.sleep(0.002)


async def test_watchdog_report_names_the_file_and_code_that_block_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    with watching(lambda: None, PERIOD_S), reading("web", "its pidfile"):
        with reading("web", "its log"):
            pass
        block_until(lambda: caplog.records)
        await until(lambda: "the event loop runs again" in caplog.text)

    told = caplog.records[0]
    assert told.levelno == logging.CRITICAL
    assert told.getMessage().startswith(
        "the event loop is blocked by reading its pidfile of web: the agent exits after"
    )
    assert __file__ in told.members["stack"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("period", [PERIOD_S, 0.0, 3600.0])
async def test_watchdog_report_names_no_file_if_none_is_being_read(
    caplog: pytest.LogCaptureFixture, period: float
) -> None:
    with reading("web", "its pidfile"):
        pass
    with watching(lambda: None, period):
        block_until(lambda: caplog.records)

    assert caplog.records[0].getMessage().startswith("the event loop is blocked: ")


async def test_watchdog_does_not_report_a_running_loop(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test lasts longer than the time after which the watchdog reports a blocked loop. This time is set to a second
    because a busy machine may stop the loop for a moment.
    """
    monkeypatch.setattr(watchdog, "REPORT_AFTER_S", 1.0)
    fed: list[float] = []
    with watching(lambda: fed.append(time.monotonic()), PERIOD_S):
        await until(lambda: fed and fed[-1] - fed[0] > 1.5)

    assert caplog.records == []
    # The watchdog thread must pause between notifications. Otherwise, it would use a whole CPU.
    assert fed[20] - fed[0] > 10 * PERIOD_S


async def test_systemd_is_notified_while_the_loop_is_blocked(caplog: pytest.LogCaptureFixture) -> None:
    """Without the notifications, systemd would kill the agent before the watchdog can report the reason."""
    fed: list[None] = []
    with watching(lambda: fed.append(None), PERIOD_S):
        block_until(lambda: caplog.records)
        count = len(fed)
        block_until(lambda: len(fed) > count)


async def test_watchdog_timer_is_rearmed_until_the_watch_ends() -> None:
    with watching(lambda: None, PERIOD_S):
        signal.setitimer(signal.ITIMER_VIRTUAL, 100 * watchdog.END_AFTER_S)
        await until(lambda: signal.getitimer(signal.ITIMER_VIRTUAL)[0] <= watchdog.END_AFTER_S)
        (thread,) = [each for each in threading.enumerate() if each.name == "watchdog"]
        assert thread.daemon

    await asyncio.to_thread(thread.join, 30)
    assert signal.getitimer(signal.ITIMER_VIRTUAL)[0] == 0


async def test_watchdog_timer_is_cancelled_when_the_watch_ends(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop may recover, and the ``with`` block may end, before the watchdog thread notices the recovery."""
    called_off: list[None] = []
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: called_off.append(None))
    with watching(lambda: None, PERIOD_S):
        block_until(lambda: caplog.records)

    await until(lambda: called_off)
    assert "the event loop runs again" not in caplog.text
