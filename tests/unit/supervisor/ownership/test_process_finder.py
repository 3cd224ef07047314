"""Tests finding and recording a service's process. ``integration/test_supervisor.py`` tests the whole lifecycle."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agent_shim.core.errors import HostError
from agent_shim.host import proc
from agent_shim.supervisor.monit.ast import MonitProgram
from agent_shim.supervisor.ownership import process_finder
from agent_shim.supervisor.ownership.process_finder import ProcessFinder, Timing
from agent_shim.supervisor.ownership.process_record import ProcessRecord, read
from agent_shim.supervisor.ownership.tie import Tie
from agent_shim.supervisor.plan import ProcessSpec


@pytest.mark.parametrize(("is_alive", "ended"), [(True, set()), (False, {77})])
async def test_start_program_exit_is_recorded(tmp_path: Path, is_alive: bool, ended: set[int]) -> None:
    finder = ProcessFinder(cast("Any", None), Timing(), lambda: None)
    finder.program = cast("Any", SimpleNamespace(is_alive=is_alive, identity=(77, 5)))
    recorded: list[object] = []
    traces = cast("Any", SimpleNamespace(ended=recorded.append))

    assert not await finder.look(ProcessSpec(name="web", job="web", pidfile=str(tmp_path / "pid")), traces)

    assert recorded == ([(77, 5)] if ended else [])


UNUSED = 2**22 + 8
"""A pid that no process can have, because it is above Linux's limit."""


@pytest.fixture
def relation(monkeypatch: pytest.MonkeyPatch) -> list[Tie]:
    """Replace ``tie`` with a function that always returns the last item of a list, and return this list."""
    found = [Tie.OWNED]
    monkeypatch.setattr(process_finder, "tie", lambda *_: (found[-1], "it is foreign"))
    return found


def finder_of(changes: list[object], *, is_there: bool = True) -> ProcessFinder:
    keepers: Any = SimpleNamespace(adopt=lambda _: Handle("process", []) if is_there else None)
    return ProcessFinder(keepers, Timing(), lambda: changes.append(1))


@pytest.mark.parametrize(("tie", "is_there"), [(Tie.OWNED, True), (Tie.NAMED, True), (Tie.OWNED, False)])
async def test_found_process_is_recorded_and_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, relation: list[Tie], tie: Tie, is_there: bool
) -> None:
    """A process that exits before it is adopted is not recorded."""
    path, changes = tmp_path / "pid", list[object]()
    path.write_text(str(UNUSED))
    relation.append(tie)
    finder = finder_of(changes, is_there=is_there)
    monkeypatch.setattr(proc, "stat", lambda number: proc.Stat(number, "S", 1, number, 6, 0, 80, 0))
    traces, spec = ProcessRecord(), ProcessSpec(name="web", job="web", pidfile=str(path), start=MonitProgram(("ctl",)))

    assert await finder.look(spec, traces) is is_there

    expected = ProcessRecord(known=(UNUSED, 80), named_by=read(path), is_only_named=tie is Tie.NAMED)
    assert traces == (expected if is_there else ProcessRecord())
    assert changes == [1] * is_there
    assert (finder.process is not None) is is_there


@pytest.mark.parametrize(
    ("pid", "state", "start", "is_only_named"),
    [
        (UNUSED, "S", None, True),
        (UNUSED, "S", MonitProgram(("ctl",)), False),
        (UNUSED, "Z", None, None),
        (1, "S", None, True),
        (0, "S", None, None),
    ],
)
async def test_pidfile_alone_identifies_the_process_if_the_service_has_no_start_program(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pid: int,
    state: str,
    start: MonitProgram | None,
    is_only_named: bool | None,
    relation: list[Tie],
) -> None:
    """Neither a zombie nor the agent is accepted. In the parameters, a ``pid`` of 0 stands for the agent's pid."""
    (tmp_path / "pid").write_text(str(pid or os.getpid()))
    monkeypatch.setattr(proc, "stat", lambda number: proc.Stat(number, state, 0, number, number, 0, 80, 0))
    traces, spec = ProcessRecord(), ProcessSpec(name="web", job="web", pidfile=str(tmp_path / "pid"), start=start)

    assert await finder_of([]).look(spec, traces) is (is_only_named is not None)

    assert (traces.known, traces.is_only_named) == (
        (pid, 80) if is_only_named is not None else None,
        bool(is_only_named),
    )


async def test_process_finder_reports_why_it_rejected_a_process(tmp_path: Path, relation: list[Tie]) -> None:
    relation.append(Tie.NONE)
    (tmp_path / "pid").write_text("1")
    finder = finder_of([])
    spec = ProcessSpec(name="web", job="web", pidfile=str(tmp_path / "pid"), start=MonitProgram(("ctl",)))

    assert not await finder.look(spec, ProcessRecord())
    assert finder.refused == f"the pidfile names process 1 ({proc.name(1)}): it is foreign"


async def test_checked_path_is_assumed_to_exist_until_the_first_check(tmp_path: Path) -> None:
    """If the path were assumed to be missing, a stop before the first check would not run the stop program."""
    finder = ProcessFinder(cast("Any", None), Timing(), lambda: None)
    spec = ProcessSpec(name="web", job="web", kind="file", path=tmp_path / "absent")

    assert await finder.look(spec, ProcessRecord())
    assert not await finder.look_at_path(spec)
    assert not await finder.look(spec, ProcessRecord())


async def test_process_finder_waits_for_the_process_without_blocking_the_loop() -> None:
    finder = ProcessFinder(cast("Any", None), Timing(linger=0.0), lambda: None)
    program: Any = Handle("program", [])
    finder.program = program
    looks: list[object] = []

    async def look(*_: object) -> bool:
        looks.append(1)
        assert len(looks) < 100
        if len(looks) == 1:
            asyncio.get_running_loop().call_later(0.005, setattr, finder, "process", program)
        return finder.process is not None

    finder.look = look  # type: ignore[method-assign,assignment]
    await finder.arrival(ProcessSpec(name="web", job="web", start=MonitProgram(("ctl",))), ProcessRecord())

    assert finder.process is program


class Handle:
    """A process handle that records its release and termination in ``calls``."""

    def __init__(self, name: str, calls: list[str], *, is_alive: bool = True, status: int | None = None) -> None:
        self.identity, self.pid = (7, 70), 7
        self.is_alive = is_alive
        self._status = status
        self._name, self._calls = name, calls

    def release(self) -> None:
        self._calls.append(self._name)

    async def wait(self) -> int | None:
        return self._status

    async def terminate(self, _: float) -> None:
        self._calls.append(f"terminate {self._name}")


async def test_each_process_handle_is_released_only_once() -> None:
    """If the start program has become the service's process, they are the same process and share one handle."""
    calls: list[str] = []
    finder = ProcessFinder(cast("Any", None), Timing(), lambda: None)
    finder.program, finder.process = cast("Any", Handle("program", calls)), cast("Any", Handle("process", calls))
    finder.release()
    finder.release()
    assert (calls, finder.program, finder.process, finder.pid) == (["program", "process"], None, None, 0)

    calls.clear()
    finder.program = finder.process = cast("Any", Handle("both", calls))
    finder.release_program()
    assert (calls, finder.pid) == ([], 7)
    finder.release()
    assert calls == ["both"]


async def test_exited_process_is_removed_from_its_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pidfile is remembered so that it cannot identify a new process that gets the same pid."""
    monkeypatch.setattr(proc, "stat", lambda _: None)
    (tmp_path / "pid").write_text("7")
    spec = ProcessSpec(name="web", job="web", pidfile=str(tmp_path / "pid"))
    finder = ProcessFinder(cast("Any", None), Timing(), lambda: None)
    finder.process, finder.refused = cast("Any", Handle("process", [], is_alive=False)), "of another service"
    traces = ProcessRecord(known=(7, 70))

    assert not await finder.look(spec, traces)

    assert (finder.process, finder.refused) == (None, "")
    assert traces.known is None
    assert traces.named_by is not None
    assert traces.named_by.pid == 7
    (tmp_path / "pid").write_text("8")
    traces.named_by, finder.process = None, cast("Any", Handle("process", [], is_alive=False))
    assert not await finder.look(spec, traces)
    assert traces.named_by is None


WAITING = object()
"""The expected outcome while the process may still appear, which is not an error."""


@pytest.mark.parametrize(
    ("named", "status", "linger", "why"),
    [
        ("7", 1, 60.0, "the process exited immediately: exit 1"),
        ("7", None, 60.0, "the process exited immediately: unknown"),
        ("", 1, 0.0, "the start program exited: exit 1"),
        ("", 1, 60.0, WAITING),
        ("", 0, 0.0, WAITING),
        ("4000010", 0, 0.0, "process 4000010 of the pidfile exited immediately"),
        ("4000010", 0, 60.0, WAITING),
        ("2", 0, 0.0, "process 2 of the pidfile exited immediately"),
    ],
)
async def test_start_fails_as_soon_as_no_process_can_appear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, status: int | None, linger: float, why: object
) -> None:
    """A pidfile that names the exited start program fails the start immediately. Any other failure is reported only
    after the lingering time.

    If the start program succeeds without writing a pidfile, the process may still appear.
    """
    (tmp_path / "pid").write_text(named)
    monkeypatch.setattr(proc, "stat", {2: proc.Stat(2, "Z", 0, 1, 1, 0, 1, 0)}.get)
    finder = ProcessFinder(cast("Any", None), Timing(linger=linger), lambda: None)
    finder.program = cast("Any", Handle("program", [], is_alive=False, status=status))
    spec = ProcessSpec(name="web", job="web", pidfile=str(tmp_path / "pid"), start=MonitProgram(("ctl",)))

    expected = pytest.raises(TimeoutError) if why is WAITING else pytest.raises(HostError, match=f"^{why}$")
    with expected:
        async with asyncio.timeout(0.2 if why is WAITING else 30):
            await finder.arrival(spec, ProcessRecord(begun=60))
