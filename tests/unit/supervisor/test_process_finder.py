"""How an end is described and recorded; the rest of presence is in test_supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agent_shim.core.errors import HostError
from agent_shim.host import proc, process
from agent_shim.supervisor import posix_regex
from agent_shim.supervisor.monit.ast import Program
from agent_shim.supervisor.ownership import Tie
from agent_shim.supervisor.plan import ProcessSpec
from agent_shim.supervisor.process_finder import KINDS, ProcessFinder, Timing, describe, kind_of
from agent_shim.supervisor.process_record import Pidfile, ProcessRecord, Session, read


@pytest.mark.parametrize(
    ("status", "text"),
    [(0, "exit 0"), (1, "exit 1"), (128, "exit 128"), (137, "SIGKILL"), (255, "exit 255"), (None, "unknown")],
)
def test_how_it_ended(status: int | None, text: str) -> None:
    """For people."""
    assert describe(status) == text


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("exit 0", "success"),
        ("exit 1", "error"),
        ("SIGKILL", "signal"),
        ("unknown", "unknown"),
        ("/a is missing", "error"),
    ],
)
def test_kinds_of_ends_are_few(how: str, kind: str) -> None:
    """They are labels of a metric."""
    assert kind_of(how) == kind
    assert kind in KINDS


@pytest.mark.parametrize(("is_alive", "ended"), [(True, set()), (False, {77})])
async def test_the_end_of_the_start_program_is_recorded(tmp_path: Path, is_alive: bool, ended: set[int]) -> None:
    """Descendants in its session stay the service's, and the number is never taken for a new session."""
    finder = ProcessFinder(cast("Any", None), Timing(), lambda: None)
    finder.program = cast("Any", SimpleNamespace(is_alive=is_alive, identity=(77, 5), pid=77, seen_ticks=9))
    recorded: list[tuple[Any, ...]] = []
    traces = cast("Any", SimpleNamespace(ended=lambda *told: recorded.append(told)))

    assert not await finder.look(ProcessSpec(name="web", job="web", pidfile=str(tmp_path / "pid")), traces)

    assert recorded == ([((77, 5), 77, 9)] if ended else [])


@pytest.mark.parametrize(("leader", "leads"), [(None, True), ("web", True), ("db", False)])
async def test_only_a_process_with_the_services_session_widens_the_record(
    monkeypatch: pytest.MonkeyPatch, leader: str | None, leads: bool
) -> None:
    """Otherwise the session of an operator's shell would be ended with the job."""
    own = proc.stat(os.getpid())
    assert own is not None
    owned = SimpleNamespace(other_leader=lambda _: leader and own, verdict=lambda _: leader)
    finder = ProcessFinder(cast("Any", owned), Timing(), lambda: None)

    async def found(*_: object) -> tuple[proc.Stat, Tie]:
        return own, Tie.OWNED

    monkeypatch.setattr(finder, "_find", found)
    monkeypatch.setattr(finder, "_take_up", lambda _: True)
    traces = ProcessRecord()

    assert await finder.look(ProcessSpec(name="web", job="web", pattern=posix_regex.compiled("x")), traces)

    assert traces.numbers() == ({own.session} - {0} if leads else set())


@pytest.mark.parametrize(("tie", "is_there"), [(Tie.OWNED, True), (Tie.NAMED, True), (Tie.OWNED, False)])
async def test_a_process_that_was_found_is_recorded_and_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tie: Tie, is_there: bool
) -> None:
    """One that ends before it is taken up is not there."""
    path, changes = tmp_path / "pid", list[object]()
    path.write_text("8")
    owned = SimpleNamespace(other_leader=lambda each: each, verdict=lambda _: "db")
    finder = ProcessFinder(cast("Any", owned), Timing(), lambda: changes.append(1))

    async def found(*_: object) -> tuple[proc.Stat, Tie]:
        return proc.Stat(8, "S", 1, 8, 6, 0, 80, 0), tie

    monkeypatch.setattr(finder, "_find", found)
    monkeypatch.setattr(process, "adopt", lambda *_: Handle("process", []) if is_there else None)
    traces = ProcessRecord()

    assert await finder.look(ProcessSpec(name="web", job="web", pidfile=str(path)), traces) is is_there

    expected = ProcessRecord(known=(8, 80), heeded=read(path), is_guest=tie is Tie.NAMED)
    assert traces == (expected if is_there else ProcessRecord())
    assert changes == [1] * is_there
    assert (finder.process.session if finder.process else None) == (6 if is_there else None)


async def test_a_living_process_proves_its_session_at_each_look() -> None:
    """Others in it are recognised by that once their leader is gone."""
    finder = ProcessFinder(cast("Any", None), Timing(), lambda: None)
    finder.process = cast("Any", Handle("process", []))
    traces = ProcessRecord(sessions=[Session(7, 70), Session(9, 90)])

    assert await finder.look(ProcessSpec(name="web", job="web"), traces)

    assert [session.seen > 0 for session in traces.sessions] == [True, False]


@pytest.mark.parametrize(
    ("pid", "state", "start", "found"),
    [
        (8, "S", None, Tie.NAMED),
        (8, "S", Program(("ctl",)), Tie.OWNED),
        (8, "Z", None, None),
        (1, "S", None, Tie.NAMED),
        pytest.param(os.getpid(), "S", None, None, id="its own"),
    ],
)
async def test_a_pidfile_is_believed_without_proof_only_where_nothing_starts_the_process(
    monkeypatch: pytest.MonkeyPatch, pid: int, state: str, start: Program | None, found: Tie | None
) -> None:
    """And never where it names the agent."""
    monkeypatch.setattr(proc, "stat", lambda number: proc.Stat(number, state, 0, number, number, 0, 80, 0))
    ownership: Any = SimpleNamespace(tie=lambda *_: (Tie.OWNED, ""))
    finder = ProcessFinder(ownership, Timing(), lambda: None)

    one = await finder._find(ProcessSpec(name="web", job="web", start=start), ProcessRecord(), Pidfile(pid, 1.0, 1))

    assert (one[0].pid, one[1]) == (pid, found) if one else found is None


async def test_a_path_is_taken_to_be_there_until_it_was_looked_at(tmp_path: Path) -> None:
    """A stop then runs the stop program."""
    finder = ProcessFinder(cast("Any", None), Timing(), lambda: None)
    spec = ProcessSpec(name="web", job="web", kind="file", path=tmp_path / "absent")

    assert await finder.look(spec, ProcessRecord())
    assert not await finder.look_at_path(spec)
    assert not await finder.look(spec, ProcessRecord())


async def test_a_process_may_come_within_the_time_of_its_start_program() -> None:
    """The event loop continues meanwhile."""
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
    await finder.arrival(ProcessSpec(name="web", job="web", start=Program(("ctl",))), ProcessRecord())

    assert finder.process is program


class Handle:
    """A handle of a process; ``calls`` are those with an effect."""

    def __init__(self, name: str, calls: list[str], *, is_alive: bool = True) -> None:
        self.identity, self.pid, self.session, self.seen_ticks = (7, 70), 7, 7, 75
        self.is_alive = is_alive
        self._name, self._calls = name, calls

    def release(self) -> None:
        self._calls.append(self._name)

    async def terminate(self, _: float) -> None:
        self._calls.append(f"terminate {self._name}")


async def test_handles_are_given_back_once() -> None:
    """A start program that became the process has one."""
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


async def test_a_process_that_has_ended_is_no_longer_the_services(tmp_path: Path) -> None:
    """Nor does its pidfile name the next one of its number."""
    (tmp_path / "pid").write_text("7")
    spec = ProcessSpec(name="web", job="web", pidfile=str(tmp_path / "pid"))
    finder = ProcessFinder(cast("Any", None), Timing(), lambda: None)
    finder.process, finder.refused = cast("Any", Handle("process", [], is_alive=False)), "of another service"
    traces = ProcessRecord(known=(7, 70))

    async def find(*_: object) -> None:
        assert (finder.process, finder.refused) == (None, "")

    finder._find = find  # type: ignore[method-assign,assignment]
    assert not await finder.look(spec, traces)

    assert traces.known is None
    assert traces.heeded is not None
    assert traces.heeded.pid == 7
    (tmp_path / "pid").write_text("8")
    traces.heeded, finder.process = None, cast("Any", Handle("process", [], is_alive=False))
    assert not await finder.look(spec, traces)
    assert traces.heeded is None


@pytest.mark.parametrize(
    ("named", "status", "is_late", "why"),
    [
        ("7", 1, False, "the process exited immediately: exit 1"),
        ("7", None, False, "the process exited immediately: unknown"),
        ("", 1, True, "the start program exited: exit 1"),
        ("", 1, False, ""),
        ("", 0, True, ""),
        ("4000010", 0, True, "process 4000010 of the pidfile exited immediately"),
        ("4000010", 0, False, ""),
        ("2", 0, True, "process 2 of the pidfile exited immediately"),
        ("1", 0, True, ""),
    ],
)
def test_when_no_process_can_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, status: int | None, is_late: bool, why: str
) -> None:
    """A start program that has ended may be followed for a while, and by a living process of its pidfile."""
    (tmp_path / "pid").write_text(named)
    table = {pid: proc.Stat(pid, state, 0, 1, 1, 0, 1, 0) for pid, state in ((1, "S"), (2, "Z"))}
    monkeypatch.setattr(proc, "stat", table.get)
    program: Any = Handle("program", [])
    spec = ProcessSpec(name="web", job="web", pidfile=str(tmp_path / "pid"))
    with pytest.raises(HostError, match=f"^{why}$") if why else contextlib.nullcontext():
        ProcessFinder._require_possible_start(program, status, spec, ProcessRecord(begun=60), is_late=is_late)

    ProcessFinder._require_possible_start(program, 0, spec, ProcessRecord(), is_late=True)  # the pidfile is not fresh
