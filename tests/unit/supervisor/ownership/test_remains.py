"""Ends of services whose ``Ownership`` is scripted. ``integration/test_ownership.py`` has processes."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent_shim.core.errors import HostError
from agent_shim.host import clock, proc, process, reaper
from agent_shim.supervisor.monit.ast import Program
from agent_shim.supervisor.ownership import remains as module
from agent_shim.supervisor.ownership.evidence import Look, Members, Ownership, Unproven, Verdict
from agent_shim.supervisor.ownership.process_record import ProcessRecord
from agent_shim.supervisor.ownership.remains import Remains
from agent_shim.supervisor.plan import BpmCall, ProcessSpec

NONE = Members([], [], (), None)
"""A pass that finds nothing, and does not know whether it has read all."""
WEB = Members([(9, 90)], [])
NAMELESS = "processes that exit before they can be listed"
BEGUN = 60
"""Start tick of the service. The agent counts orphans since tick 50."""


class Scripted(Ownership):
    """``passes`` are the results of the searches, the last for all further ones. ``each_pass`` is called in each."""

    def __init__(self) -> None:
        super().__init__(Path("/var/vcap"))
        self.passes = [NONE]
        self.each_pass: Callable[[], object] = lambda: None
        self.owner: Verdict = "web"
        """Owner of each orphan that ends."""
        self.group = SimpleNamespace(is_empty=lambda: True, members=list, kill=lambda: None, remove=lambda: None)
        self.count = 0

    def look(self) -> Look:
        self.count += 1
        return Look({}, {}, {}, frozenset(), {})

    def members(self, *_: object) -> Members:
        self.each_pass()
        return self.passes.pop(0) if len(self.passes) > 1 else self.passes[0]

    def strays(self, *_: object, of_jobs: bool = True) -> Members:
        return self.members() if of_jobs else Members([(5, 50)], [])

    def cgroup(self, _: str) -> Any:
        return self.group

    def attribute(self, _each: proc.Stat, _ending: Collection[Verdict] = ()) -> Verdict:
        return self.owner


@pytest.fixture
def ownership() -> Scripted:
    return Scripted()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, signal.Signals]]:
    """Signals that were sent. Each process has exited afterwards."""
    found: list[tuple[int, signal.Signals]] = []
    monkeypatch.setattr(process, "send", lambda identity, sig: found.append((identity[0], sig)))
    monkeypatch.setattr(proc, "stat", lambda _: None)
    return found


@pytest.fixture
def remains(ownership: Scripted, monkeypatch: pytest.MonkeyPatch, sent: object) -> Remains:
    monkeypatch.setattr(module, "PROOF_PAUSE_S", 0.0)
    monkeypatch.setattr(proc, "name", str)
    monkeypatch.setattr(process, "takes_orphans", True)
    monkeypatch.setattr(reaper, "reap_some", lambda: False)
    monkeypatch.setattr(clock, "boot_ticks", lambda: 50)
    made = Remains(ownership)
    made.count(list)
    return made


def end_orphan() -> None:
    for heir in list(reaper.heirs):
        heir(proc.Stat(7, "Z", 1, 7, 7, 0, 1000, 0))


async def swept(
    remains: Remains, begun: int = BEGUN, *, is_in_cgroup: bool = False, is_usual: bool = False
) -> list[str]:
    traces = ProcessRecord(begun=begun, is_in_cgroup=is_in_cgroup)
    return [str(each) for each in await remains.sweep("web", traces, (), 0.0, is_usual=is_usual)]


@pytest.mark.parametrize(
    ("owner", "left"), [("web", [NAMELESS]), (Unproven.ORPHAN, [NAMELESS]), ("other", []), (Unproven.AGENTS, [])]
)
async def test_stop_is_not_complete_while_each_pass_finds_an_exiting_orphan(
    remains: Remains, ownership: Scripted, owner: Verdict, left: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The orphan may have left a child that no pass saw."""
    monkeypatch.setattr(process, "kill_group_of", lambda _: None)
    ownership.owner, ownership.each_pass = owner, end_orphan

    assert await swept(remains) == left
    assert reaper.heirs == []


async def test_orphans_exiting_after_a_pass_are_reaped_before_it_counts(
    remains: Remains, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = [True, True, False] * 3

    def reap_some() -> bool:
        if more := ends.pop(0) if ends else False:
            end_orphan()
        return more

    monkeypatch.setattr(process, "kill_group_of", lambda _: None)
    monkeypatch.setattr(reaper, "reap_some", reap_some)
    assert await swept(remains) == []
    assert ends == []

    monkeypatch.setattr(reaper, "reap_some", lambda: True)
    assert await swept(remains) == [NAMELESS]


async def test_exiting_orphan_is_waited_for_or_named(remains: Remains, ownership: Scripted) -> None:
    exiting = Members([], [], [(8, 80)])
    ownership.passes = [NONE, exiting, NONE]
    assert await swept(remains) == []

    ownership.passes = [exiting]
    assert await swept(remains) == ["8 (8)"]


@pytest.mark.parametrize(("begun", "are_taken"), [(60, True), (40, True), (60, False)])
@pytest.mark.parametrize(
    ("unread", "left", "passes"),
    [
        ([()], [], 1),
        ([(7,), ()], [], 2),
        ([(7,), (8,), (8,)], [], 3),
        ([None, (7,), (8,), ()], [], 4),
        ([(number,) for number in range(1000)], [NAMELESS], 0),
        ([None], [NAMELESS], 0),
    ],
)
async def test_pass_with_an_unread_process_is_inconclusive_without_orphan_counts(
    remains: Remains,
    ownership: Scripted,
    monkeypatch: pytest.MonkeyPatch,
    begun: int,
    are_taken: bool,
    unread: list[tuple[int, ...] | None],
    left: list[str],
    passes: int,
) -> None:
    """A process that was already exiting in the previous pass counts as read, because it cannot fork any more."""
    ahead = [Members([], [], (), None if each is None else frozenset(each)) for each in unread]
    monkeypatch.setattr(process, "takes_orphans", are_taken)
    if begun == 60 and are_taken:
        left, passes = [], 1
    ownership.passes = [NONE, *ahead]

    assert await swept(remains, begun) == left
    if not left:
        assert ownership.count == 1 + passes


async def test_cgroup_state_decides_whether_a_service_is_stopped(
    remains: Remains, ownership: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await swept(remains, is_in_cgroup=True) == []
    ownership.group.is_empty = lambda: False
    monkeypatch.setattr(process, "KILL_TIMEOUT_S", -1.0)
    assert await swept(remains, is_in_cgroup=True) == [NAMELESS]
    ownership.group.members = lambda: [(8, 80)]
    assert await swept(remains, is_in_cgroup=True) == ["8 (8)"]


async def test_process_found_only_by_the_final_check_is_signalled(
    remains: Remains, ownership: Scripted, sent: list[tuple[int, signal.Signals]]
) -> None:
    ownership.passes = [NONE, WEB, WEB, NONE]

    assert await swept(remains) == []
    assert sent == [(9, signal.SIGTERM)]
    assert remains.killed == set()


@pytest.mark.parametrize(("is_usual", "killed"), [(False, {"web"}), (True, set())])
async def test_kill_is_recorded_and_includes_process_groups_of_orphans(
    remains: Remains,
    ownership: Scripted,
    sent: list[tuple[int, signal.Signals]],
    monkeypatch: pytest.MonkeyPatch,
    is_usual: bool,
    killed: set[str],
) -> None:
    groups: list[bool] = []
    monkeypatch.setattr(process, "kill_group_of", lambda _: groups.append(signal.SIGKILL in dict(map(reversed, sent))))  # type: ignore[arg-type]
    ownership.passes = [WEB, WEB, WEB, NONE]
    ownership.each_pass = lambda: end_orphan() if len(ownership.passes) > 1 else None

    assert await swept(remains, is_usual=is_usual) == []

    assert [sig for _, sig in sent] == [signal.SIGTERM, signal.SIGKILL, signal.SIGKILL]
    assert remains.killed == killed
    assert groups == [True]
    end_orphan()
    assert len(groups) == 1


@pytest.mark.parametrize(("user", "groups"), [(1000, 1), (0, 0)])
async def test_orphans_of_jobs_are_killed_with_their_groups_and_orphans_of_root_are_not(
    remains: Remains,
    ownership: Scripted,
    sent: list[tuple[int, signal.Signals]],
    monkeypatch: pytest.MonkeyPatch,
    user: int,
    groups: int,
) -> None:
    found: list[proc.Stat] = []
    monkeypatch.setattr(process, "kill_group_of", found.append)
    monkeypatch.setattr(proc, "user", lambda _: user)
    monkeypatch.setattr(module, "is_job_user", lambda number: number != 0)
    ownership.owner, ownership.passes = Unproven.ORPHAN, [WEB, WEB, Members([], [])]
    ownership.each_pass = lambda: end_orphan() if (9, signal.SIGKILL) in sent and not found else None

    assert await remains.sweep_strays(0, 0.0) == []
    assert [sig for _, sig in sent] == [signal.SIGTERM, signal.SIGKILL]
    assert len(found) == groups


async def test_signalled_processes_get_time_to_exit(
    remains: Remains, ownership: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process with the number of one that has exited is another."""
    starts = iter([90, 90, 91])
    monkeypatch.setattr(proc, "stat", lambda pid: proc.Stat(pid, "S", 1, pid, pid, 0, next(starts), 0))
    ownership.passes = [WEB, NONE]

    assert await remains.sweep("web", ProcessRecord(), (), 60.0) == []
    assert next(starts, None) is None


@pytest.mark.parametrize("survives", [False, True])
async def test_remaining_process_of_the_last_run_prevents_a_start(
    remains: Remains, ownership: Scripted, monkeypatch: pytest.MonkeyPatch, survives: bool
) -> None:
    """It may hold a port."""
    monkeypatch.setattr(module, "EXIT_WAIT_S", -1.0)
    ownership.passes = [WEB] if survives else [WEB, WEB, NONE]
    refused = pytest.raises(HostError, match=r"cannot end remaining processes of the last run: 9 \(9\)")
    with refused if survives else contextlib.nullcontext():
        await remains.clear("web", ProcessRecord(), 0.0)

    assert remains.killed == set()


async def test_orphans_are_attributed_only_during_a_search(
    remains: Remains, ownership: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At other times an orphan is only reaped. Searches overlap."""
    attributed: list[proc.Stat] = []

    def attribute(each: proc.Stat, _: object) -> Verdict:
        attributed.append(each)
        return Unproven.FOREIGN

    monkeypatch.setattr(ownership, "attribute", attribute)
    ownership.each_pass = end_orphan
    end_orphan()
    assert attributed == []

    await asyncio.gather(remains.strays(60), remains.strays(60))
    assert len(attributed) == 2
    end_orphan()
    assert len(attributed) == 2


async def test_orphans_of_operators_are_described(remains: Remains) -> None:
    assert await remains.doubtful(0) == "stopped, but may have started 5 (5)"


UNUSED = 2**22 + 8
"""A number above all that Linux gives, so never that of the test."""


async def test_descendants_are_recorded_while_any_are_known(
    remains: Remains, ownership: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is read for services in a cgroup or without processes."""
    table = {UNUSED: proc.Stat(UNUSED, "S", 1, UNUSED, UNUSED, 0, 1000, 0)}
    looks: list[Look] = []

    def look() -> Look:
        looks.append(Look(table, {}, {}, frozenset(), {}))
        return looks[-1]

    monkeypatch.setattr(ownership, "look", look)
    traces = ProcessRecord()
    ownership.records = lambda: [("web", traces)]
    await remains.record_descendants()
    traces.is_in_cgroup, traces.known = True, (UNUSED, 1000)
    await remains.record_descendants()
    assert looks == []

    traces.is_in_cgroup, traces.known, traces.descendants = False, None, [(UNUSED, 1000), (UNUSED + 1, 1000)]
    await remains.record_descendants()
    assert (len(looks), traces.descendants) == (1, [(UNUSED, 1000)])


async def test_descendants_are_searched_outside_the_event_loop(
    remains: Remains, ownership: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job can have thousands, and there may be hundreds of services."""
    loop = threading.current_thread()

    class Table(dict[int, proc.Stat]):
        def __getitem__(self, pid: int) -> proc.Stat:
            assert threading.current_thread() is not loop
            return super().__getitem__(pid)

    table = Table({UNUSED: proc.Stat(UNUSED, "S", 1, UNUSED, UNUSED, 0, 1000, 0)})
    monkeypatch.setattr(ownership, "look", lambda: Look(table, {}, {}, frozenset(), {}))
    traces = [ProcessRecord(descendants=[(UNUSED + number, 1000)]) for number in range(2)]
    ownership.records = lambda: [("web", traces[0]), ("other", traces[1])]

    await remains.record_descendants()

    assert [each.descendants for each in traces] == [[(UNUSED, 1000)], []]


@pytest.mark.parametrize(("is_bpm", "removed"), [(False, 1), (True, 0)])
async def test_cgroup_of_a_stopped_service_is_removed(
    remains: Remains, ownership: Scripted, is_bpm: bool, removed: int
) -> None:
    """The cgroup of a bpm process stays until its counters are read."""
    calls: list[None] = []
    ownership.group.remove = lambda: calls.append(None)
    call = BpmCall("start", "web", "web") if is_bpm else None

    await remains.dismiss(ProcessSpec("web", "web", start=Program(("ctl",)), start_call=call))
    await remains.dismiss(ProcessSpec("web", "web"))

    assert len(calls) == removed


async def test_callers_share_a_process_pass_that_begins_after_their_call(remains: Remains, ownership: Scripted) -> None:
    """An older one does not show processes that have started since."""
    first, second = await asyncio.gather(remains.look(), remains.look())
    third = await remains.look()

    assert (first is second, third is first, ownership.count) == (True, False, 2)
