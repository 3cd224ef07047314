"""Proof that a service is over, and its output; ``integration/test_ctl_programs.py`` runs programs."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from agent_shim.core.errors import HostError
from agent_shim.host import clock, proc, process, reaper
from agent_shim.supervisor import ctl_programs
from agent_shim.supervisor.ctl_programs import MAX_OUTPUT_BYTES, Programs, TokenBucket
from agent_shim.supervisor.monit.ast import Program
from agent_shim.supervisor.ownership import Left, Look, Members, Unproven, Verdict
from agent_shim.supervisor.plan import BpmCall, ProcessSpec
from agent_shim.supervisor.process_record import Identity, ProcessRecord
from tests.support.played import played

ORPHAN = proc.Stat(7, "Z", 1, 7, 7, 0, 1000, 0)
NONE = Members([], [])
BEGUN = 50
"""Tick at which the count of exited orphans begins."""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Programs]:
    """Programs whose cgroups are empty, and whose passes see no process."""
    one = Programs(tmp_path, tmp_path)
    cage = SimpleNamespace(is_empty=lambda: True, members=list, kill=lambda: None)
    monkeypatch.setattr(one.ownership, "cage", lambda _: cage)
    monkeypatch.setattr(ctl_programs, "look", lambda _: Look({}, {}, {}, {}))
    monkeypatch.setattr(ctl_programs, "PROOF_PAUSE_S", 0.0)
    monkeypatch.setattr(clock, "boot_ticks", lambda: BEGUN)
    monkeypatch.setattr(process, "takes_orphans", True)
    monkeypatch.setattr(proc, "last_number", lambda: None)
    monkeypatch.setattr(proc, "name", str)
    monkeypatch.setattr(proc, "stat", lambda _: None)
    monkeypatch.setattr(reaper, "reap_some", lambda: False)
    with one.counting(list):
        yield one
    assert reaper.heirs == []


def orphan_exits() -> None:
    """Tell those who wait for the exits of orphans of one."""
    for heir in reaper.heirs:
        heir(ORPHAN)


@pytest.mark.parametrize(
    ("verdict", "user", "by_sweep", "by_sweep_of_strays"),
    [
        ("web", 1000, True, False),
        ("web", 0, True, False),
        ("other", 1000, False, False),
        (Unproven.ORPHAN, 1000, False, True),
        (Unproven.ORPHAN, 0, False, False),
        (Unproven.AGENTS, 1000, False, False),
    ],
)
async def test_the_groups_of_orphans_are_killed_during_a_kill_of_their_service(
    programs: Programs,
    monkeypatch: pytest.MonkeyPatch,
    verdict: Verdict,
    user: int,
    by_sweep: bool,
    by_sweep_of_strays: bool,
) -> None:
    """An orphan of root without an owner may be of an operator."""
    killed: list[proc.Stat] = []
    left = [(9, 90)]

    def send(_: Identity, sig: int) -> None:
        orphan_exits()
        if sig == signal.SIGKILL:
            left.clear()

    monkeypatch.setattr(programs.ownership, "attribute", lambda *_: verdict)
    monkeypatch.setattr(programs.ownership, "members", lambda *_: Members(list(left), []))
    monkeypatch.setattr(programs.ownership, "strays", lambda *_: Members(list(left), []))
    monkeypatch.setattr(process, "kill_group_of", killed.append)
    monkeypatch.setattr(process, "send", send)
    monkeypatch.setattr(proc, "user", lambda _: user)
    monkeypatch.setattr("agent_shim.supervisor.ownership.is_job_user", lambda number: number != 0)

    assert await programs.sweep("web", ProcessRecord(), (), 0.0) == []
    assert (killed, programs.killed) == ([ORPHAN] * by_sweep, {"web"})

    killed.clear()
    left.append((9, 90))
    assert await programs.sweep_strays(BEGUN, 0.0) == []
    assert killed == [ORPHAN] * by_sweep_of_strays


@pytest.mark.parametrize("left", [[], [Left(9, 90, "web")]])
async def test_a_start_follows_only_an_end_of_the_last_run(
    programs: Programs, monkeypatch: pytest.MonkeyPatch, left: list[Left]
) -> None:
    """A kill is usual then; a process that survives it may hold a port."""
    usual: list[bool] = []

    async def sweep(*_: object, is_usual: bool) -> list[Left]:
        usual.append(is_usual)
        return left

    monkeypatch.setattr(ctl_programs, "EXIT_WAIT_S", -1.0)
    monkeypatch.setattr(programs.ownership, "members", lambda *_: Members([(9, 90)], []))
    monkeypatch.setattr(programs, "sweep", sweep)
    refused = pytest.raises(HostError, match=r"cannot end remaining processes of the last run: 9 \(web\)")
    with refused if left else contextlib.nullcontext():
        await programs.clear("web", ProcessRecord(), 0.0)

    assert usual == [True]


async def test_a_process_born_after_a_pass_is_found_by_the_next(
    programs: Programs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    sent: list[object] = []
    passes = [NONE, Members([(9, 90)], []), Members([(9, 90)], []), NONE, NONE]
    monkeypatch.setattr(process, "send", lambda *each: sent.append(each))
    monkeypatch.setattr(programs.ownership, "members", lambda *_: passes.pop(0))

    assert await programs.sweep("web", ProcessRecord(begun=BEGUN), (), 0.1) == []
    assert sent == [((9, 90), signal.SIGTERM)]
    assert "web: sending SIGTERM to remaining processes: 9" in caplog.text
    assert programs.killed == set()


async def test_a_cgroup_that_never_empties_names_its_members(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that exit before they are listed have no name."""
    members: list[Identity] = []
    cage = SimpleNamespace(is_empty=lambda: False, members=lambda: members, kill=lambda: None)
    monkeypatch.setattr(programs.ownership, "cage", lambda _: cage)
    monkeypatch.setattr(programs.ownership, "members", lambda *_: NONE)
    monkeypatch.setattr(process, "KILL_TIMEOUT_S", -1.0)
    record = ProcessRecord(begun=BEGUN, is_caged=True)

    assert await programs.sweep("web", record, (), 0.0, is_usual=True) == [ctl_programs.NAMELESS]
    members.append((8, 80))
    assert [str(each) for each in await programs.sweep("web", record, (), 0.0, is_usual=True)] == ["8 (8)"]
    assert programs.killed == set()


# --- proof ----------------------------------------------------------------------------------------------------------


def passing(passes: list[Members], each: Callable[[], None] = lambda: None) -> Callable[..., Members]:
    """Return the result of one pass after the other, the last one without end."""

    def find(*_: object) -> Members:
        each()
        return passes.pop(0) if len(passes) > 1 else passes[0]

    return find


async def test_orphans_are_attributed_only_during_a_search(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    """At other times an orphan costs only its reaping; searches overlap."""
    heirs: list[int] = []
    monkeypatch.setattr(programs.ownership, "strays", passing([NONE], lambda: heirs.append(len(reaper.heirs))))
    assert reaper.heirs == []

    await asyncio.gather(programs.strays(BEGUN), programs.strays(BEGUN))

    assert heirs == [1, 1]
    assert reaper.heirs == []


@pytest.mark.parametrize(("verdict", "is_over"), [(Unproven.ORPHAN, False), ("other", True)])
async def test_orphans_that_come_and_go_are_not_over(
    programs: Programs, monkeypatch: pytest.MonkeyPatch, verdict: Verdict, is_over: bool
) -> None:
    """Each pass finds none, and another one has exited meanwhile."""
    monkeypatch.setattr(programs.ownership, "attribute", lambda *_: verdict)
    monkeypatch.setattr(programs.ownership, "strays", passing([NONE], orphan_exits))

    assert await programs.strays(BEGUN) == ([] if is_over else [ctl_programs.NAMELESS])


@pytest.mark.parametrize(
    ("passes", "left"),
    [
        ([Members([], [], [(8, 80)]), Members([], [], [(9, 90)]), Members([(7, 70)], [])], ["7 (7)"]),
        ([Members([], [], [(8, 80)]), NONE], []),
        ([Members([], [], [(8, 80)])], ["8 (8)"]),
    ],
)
async def test_an_orphan_that_is_exiting_proves_nothing(
    programs: Programs, monkeypatch: pytest.MonkeyPatch, passes: list[Members], left: list[str]
) -> None:
    """It may have left a child; the next pass decides."""
    monkeypatch.setattr(programs.ownership, "strays", passing(passes))

    assert [str(each) for each in await programs.strays(BEGUN)] == left


@pytest.mark.parametrize(
    ("verdict", "are_more", "is_over"),
    [("web", 2, True), (Unproven.ORPHAN, 2, False), (Unproven.ORPHAN, 0, False), ("web", 10_000, False)],
)
async def test_what_has_exited_is_reaped_before_a_pass_counts(
    programs: Programs, monkeypatch: pytest.MonkeyPatch, verdict: Verdict, are_more: int, is_over: bool
) -> None:
    """Not without end where as many exit as are reaped. The loop has its turns meanwhile."""
    turns: list[int] = []
    left = 0

    def refill() -> None:
        nonlocal left
        left = are_more

    def reap_some() -> bool:
        nonlocal left
        orphan_exits()
        asyncio.get_running_loop().call_soon(turns.append, left)
        left -= 1
        return left >= 0

    monkeypatch.setattr(programs.ownership, "attribute", lambda *_: verdict)
    monkeypatch.setattr(programs.ownership, "strays", passing([NONE], refill))
    monkeypatch.setattr(reaper, "reap_some", reap_some)

    assert await programs.strays(BEGUN) == ([] if is_over else [ctl_programs.NAMELESS])
    assert len(turns) >= are_more // 2 or are_more > ctl_programs.MAX_REAPING_TURNS


@pytest.mark.parametrize(
    ("begun", "are_taken", "last", "births", "passes"),
    [
        (BEGUN + 10, True, None, 0, 1),
        (BEGUN - 10, True, None, 0, 40),
        (BEGUN + 10, False, None, 0, 40),
        (BEGUN - 10, True, 5, 0, 1),
        (BEGUN + 10, False, 5, 0, 1),
        (BEGUN - 10, True, 5, 1, 40),
    ],
)
async def test_many_passes_prove_the_end_of_a_service_whose_orphans_go_elsewhere(
    programs: Programs,
    monkeypatch: pytest.MonkeyPatch,
    begun: int,
    are_taken: bool,
    last: int | None,
    births: int,
    passes: int,
) -> None:
    """Those of an earlier agent do. One pass suffices during which no process has started; its own threads are none."""
    born: list[int] = []

    def read() -> None:
        born.append(births)
        proc.readers += 1

    monkeypatch.setattr(proc, "last_number", lambda: last and last + sum(born) + proc.readers)
    monkeypatch.setattr(process, "takes_orphans", are_taken)
    monkeypatch.setattr(programs.ownership, "strays", passing([NONE], read))

    assert await programs.strays(begun) == []
    assert len(born) == passes


async def test_callers_share_a_pass_that_begins_after_their_call(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later one takes its own: an older one shows no process that has started since."""
    looks: list[Look] = []

    def look(_: object) -> Look:
        looks.append(Look({}, {}, {}, {}))
        return looks[-1]

    monkeypatch.setattr(ctl_programs, "look", look)
    monkeypatch.setattr(programs.ownership, "members", lambda *_: NONE)

    await asyncio.gather(*(programs.members("web", ProcessRecord()) for _ in range(3)))
    assert len(looks) == 1
    await programs.members("web", ProcessRecord())
    assert len(looks) == 2


async def test_descendants_are_recorded_while_any_are_known(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a process that has ended too; nothing is read for services in a cgroup or without processes."""
    looks: list[object] = []
    table = {8: proc.Stat(8, "S", 1, 8, 8, 0, 1000, 0)}

    def look(_: object) -> Look:
        looks.append(1)
        return Look(table, proc.children(table), {}, {})

    record = ProcessRecord()
    monkeypatch.setattr(ctl_programs, "look", look)
    programs.ownership.records = lambda: [("web", record)]
    await programs.see_kin()
    record.is_caged, record.known = True, (8, 1000)
    await programs.see_kin()
    assert looks == []

    record.is_caged, record.known, record.kin = False, None, [(8, 1000), (9, 1000)]
    await programs.see_kin()
    assert (looks, record.kin) == ([1], [(8, 1000)])


@pytest.mark.parametrize(("is_bpm", "removed"), [(False, ["web"]), (True, [])])
async def test_the_cgroup_of_a_stopped_service_is_removed(
    programs: Programs, monkeypatch: pytest.MonkeyPatch, is_bpm: bool, removed: list[str]
) -> None:
    """That of a bpm process stays until its counters are read."""
    found: list[str] = []
    monkeypatch.setattr(programs.ownership, "cage", lambda label: SimpleNamespace(remove=lambda: found.append(label)))
    call = BpmCall("start", "web", "web") if is_bpm else None

    await programs.dismiss(ProcessSpec("web", "web", start=Program(("ctl",)), start_call=call))
    await programs.dismiss(ProcessSpec("web", "web"))

    assert found == removed


@played
async def test_a_bucket_fills_by_the_time_since_the_last_turn() -> None:
    """A caller that gives up returns its turn."""
    clock, bucket = asyncio.get_running_loop().time, TokenBucket(5, 1)
    for seconds, takes, after in ((0, 5, 0), (0, 3, 3), (2, 2, 5), (100, 5, 105), (0, 1, 106)):
        await asyncio.sleep(seconds)
        for _ in range(takes):
            await bucket.take()
        assert round(clock(), 6) == after
    waiting = [asyncio.create_task(bucket.take()) for _ in range(10)]
    await asyncio.sleep(0.5)
    for each in waiting:
        each.cancel()
    await asyncio.wait(waiting)
    await bucket.take()
    assert round(clock(), 6) == 107


async def test_only_large_output_is_cut(programs: Programs, tmp_path: Path) -> None:
    """To its end, which holds the last words."""
    large = b"".join(b"%d\n" % number for number in range(60_000))
    assert len(large) > MAX_OUTPUT_BYTES
    for name, content in (("large.log", large), ("small.log", b"x\n"), ("full.log", bytes(MAX_OUTPUT_BYTES))):
        (tmp_path / name).write_bytes(content)
    (tmp_path / "other").write_bytes(large)

    await programs.trim()

    assert (tmp_path / "large.log").read_bytes() == large[-MAX_OUTPUT_BYTES // 2 :]
    assert (tmp_path / "small.log").read_bytes() == b"x\n"
    assert (tmp_path / "full.log").stat().st_size == MAX_OUTPUT_BYTES
    assert (tmp_path / "other").read_bytes() == large
