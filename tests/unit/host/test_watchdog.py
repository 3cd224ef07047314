"""The notes and the thread of the watchdog; ``integration/test_watchdog.py`` has agents that are held."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import pytest

from agent_shim.host import watchdog
from agent_shim.host.watchdog import DUMP, MARKS, PAGE, Watchdog, read_marks, reading, write_marks


@pytest.fixture
def dog() -> Iterator[Watchdog]:
    """Looks a hundred times in a second."""
    made = Watchdog(period=0.01)
    yield made
    made.stop()
    made.disown()
    faulthandler.unregister(signal.SIGVTALRM)
    if made._trace is not None:
        made._trace.close()


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.002)


def held_until(holds: Callable[[], object]) -> None:
    """As ``until``, without a turn of the loop."""
    given_up_at = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < given_up_at
        time.sleep(0.002)


def thread_of_the_dog() -> threading.Thread:
    return next(thread for thread in threading.enumerate() if thread.name == "watchdog")


def test_the_timer_runs_once_there_is_a_place_for_its_dump(dog: Watchdog, tmp_path: Path) -> None:
    """A hold within the first step of the thread once lasted for ever."""
    dog.remember(tmp_path)
    assert signal.getitimer(signal.ITIMER_VIRTUAL)[0] > 0

    dog.stop()
    assert signal.getitimer(signal.ITIMER_VIRTUAL)[0] == 0


@pytest.mark.parametrize(
    ("period", "paces"),
    [(0.0, (watchdog.STEP_S, watchdog.BEAT_S)), (5.0, (watchdog.STEP_S, 5.0)), (1.0, (0.5, 1.0))],
)
def test_a_period_makes_the_looks_more_frequent_and_none_does_not(period: float, paces: tuple[float, float]) -> None:
    """A thread without a pause would take a processor."""
    made = Watchdog(period=period)

    assert (made._step, made._beat) == paces


async def test_the_timer_is_set_again_while_the_loop_turns(dog: Watchdog, tmp_path: Path) -> None:
    """At its end it kills the process."""
    dog.start()
    dog.remember(tmp_path)
    signal.setitimer(signal.ITIMER_VIRTUAL, 100 * watchdog.END_AFTER_S)

    await until(lambda: signal.getitimer(signal.ITIMER_VIRTUAL)[0] <= watchdog.END_AFTER_S)
    await until(lambda: dog._beats > 2)


async def test_the_thread_ends_with_its_dog_and_holds_no_end_of_the_process(dog: Watchdog) -> None:
    dog.start()
    thread = thread_of_the_dog()
    assert thread.daemon

    dog.stop()
    thread.join(30)
    assert not thread.is_alive()


async def test_the_page_has_what_the_loop_reads(dog: Watchdog, tmp_path: Path) -> None:
    """A part is read within another; other threads hold no loop."""

    def noted() -> list[str]:
        return (tmp_path / PAGE).read_bytes().decode().split("\0")[:2]

    def read_elsewhere() -> None:
        with reading("other", "its log"):
            seen.append(noted())

    seen: list[list[str]] = []
    dog.start()
    dog.remember(tmp_path)
    with reading("web", "its pidfile"):
        assert noted() == ["web", "its pidfile"]
        with reading("web", "its log"):
            assert noted() == ["web", "its log"]
        await asyncio.to_thread(read_elsewhere)
        seen.append(noted())
        assert watchdog._readings == {threading.get_ident(): ("web", "its pidfile")}

    assert seen == [["web", "its pidfile"]] * 2
    assert noted() == ["", ""]
    assert watchdog._readings == {}


async def test_what_holds_the_loop_is_told_and_recorded_until_it_turns(
    dog: Watchdog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watchdog, "TELL_AFTER_S", 0.03)
    monkeypatch.setattr(watchdog, "END_AFTER_S", 3600.0)
    write_marks(tmp_path / MARKS, {"db": "its log"})
    dog.start()
    dog.remember(tmp_path)

    with reading("Web", "its pidfile"):
        held_until(lambda: read_marks(tmp_path / MARKS) == {"db": "its log", "web": "its pidfile"})
    await until(lambda: read_marks(tmp_path / MARKS) == {"db": "its log"})

    told = next(record for record in caplog.records if record.levelno == logging.CRITICAL)
    assert told.getMessage() == "the event loop is blocked by reading its pidfile of Web for 0.03 s"
    assert __file__ in told.members["stack"]  # type: ignore[attr-defined]
    assert "the event loop runs again" in caplog.text


async def test_nothing_is_told_of_a_loop_that_turns(dog: Watchdog, caplog: pytest.LogCaptureFixture) -> None:
    steps: list[None] = []
    dog._feed = lambda: steps.append(None)
    dog.start()

    await until(lambda: len(steps) > 20)
    await until(lambda: all(thread.name != "watchdog report" for thread in threading.enumerate()))
    assert caplog.records == []


async def test_a_record_that_is_written_late_does_not_stay(
    dog: Watchdog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk that blocked the loop may keep the record for longer."""
    begun, runs_again = threading.Event(), threading.Event()

    def slow(path: Path, marks: dict[str, str]) -> None:
        begun.set()
        assert runs_again.wait(30)
        write_marks(path, marks)

    monkeypatch.setattr(watchdog, "TELL_AFTER_S", 0.03)
    monkeypatch.setattr(watchdog, "END_AFTER_S", 3600.0)
    monkeypatch.setattr(watchdog, "write_marks", slow)
    dog.start()
    dog.remember(tmp_path)

    with reading("web", "its pidfile"):
        held_until(begun.is_set)
    await until(lambda: "the event loop runs again" in caplog.text)
    runs_again.set()
    await until(lambda: not dog._marking.locked() and not dog._marked)

    assert read_marks(tmp_path / MARKS) == {}


async def test_the_directory_of_another_agent_is_left_alone(
    dog: Watchdog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watchdog, "TELL_AFTER_S", 0.03)
    monkeypatch.setattr(watchdog, "END_AFTER_S", 3600.0)
    dog.start()
    dog.remember(tmp_path)
    dog.disown()

    with reading("web", "its pidfile"):
        held_until(lambda: "the event loop is blocked" in caplog.text)
    await until(lambda: "the event loop runs again" in caplog.text)

    assert not (tmp_path / MARKS).exists()
    assert not any((tmp_path / PAGE).read_bytes())


def test_a_held_interpreter_leaves_all_its_stacks_and_ends(
    dog: Watchdog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the file, and once that is another agent's on stderr."""
    registered: list[tuple[int, int, bool, bool]] = []

    def register(number: int, file: TextIO | int, *, all_threads: bool = True, chain: bool = False) -> None:
        fd = file if isinstance(file, int) else file.fileno()
        registered.append((number, os.fstat(fd).st_ino, all_threads, chain))

    monkeypatch.setattr(faulthandler, "register", register)
    dog.disown()
    assert registered == []
    dog.remember(tmp_path)
    dog.disown()

    places = [(tmp_path / DUMP).stat().st_ino, os.fstat(sys.stderr.fileno()).st_ino]
    assert registered == [(signal.SIGVTALRM, place, True, True) for place in places]


@pytest.mark.parametrize(
    ("page", "marks"),
    [
        (b"Web\0its pidfile\0\0", {"db": "its log", "web": "its pidfile"}),
        (b"\0\0\0", {"db": "its log"}),
        (None, {"db": "its log"}),
    ],
)
def test_what_held_the_interpreter_of_the_agent_before_is_recorded(
    dog: Watchdog, tmp_path: Path, caplog: pytest.LogCaptureFixture, page: bytes | None, marks: dict[str, str]
) -> None:
    """It could not do so itself."""
    write_marks(tmp_path / MARKS, {"db": "its log"})
    (tmp_path / DUMP).write_text("Current thread (most recent call first)")
    if page is not None:
        (tmp_path / PAGE).write_bytes(page)

    dog.remember(tmp_path)

    assert read_marks(tmp_path / MARKS) == marks
    assert "its interpreter was blocked" in caplog.text


@pytest.mark.parametrize("content", [None, b"", b"[]", b'{"web": 1}', b"\xff"])
def test_records_may_be_missing_or_broken(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / MARKS).write_bytes(content)

    assert read_marks(tmp_path / MARKS) == {}
