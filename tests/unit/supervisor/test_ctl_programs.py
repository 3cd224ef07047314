"""Decisions about processes that remain and about output; ``integration/test_ctl_programs.py`` runs programs."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from agent_shim.core.errors import HostError
from agent_shim.host import clock, proc, process, reaper
from agent_shim.supervisor import ctl_programs
from agent_shim.supervisor.ctl_programs import MAX_OUTPUT_BYTES, Programs, TokenBucket
from agent_shim.supervisor.ownership import Left, Look, Members, Unproven, Verdict
from agent_shim.supervisor.plan import BpmCall, ProcessSpec, Program
from agent_shim.supervisor.process_record import Identity, ProcessRecord

ORPHAN = proc.Stat(7, "Z", 1, 7, 7, 0, 1000, 0)
EMPTY = SimpleNamespace(is_empty=lambda: True, members=list)
"""A cgroup."""


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    return Programs(tmp_path, tmp_path)


@pytest.mark.parametrize(
    ("verdict", "hunted", "user", "is_killed"),
    [
        ("web", {"web"}, 1000, True),
        ("web", {"web"}, 0, True),
        ("web", {"other"}, 1000, False),
        ("web", set(), 1000, False),
        (Unproven.ORPHAN, {Unproven.ORPHAN}, 1000, True),
        (Unproven.ORPHAN, {Unproven.ORPHAN}, 0, False),
        (Unproven.ORPHAN, {"web"}, 1000, False),
        (Unproven.AGENTS, {"web"}, 1000, False),
    ],
)
def test_the_group_of_an_orphan_is_killed_where_its_owner_is_hunted(
    programs: Programs,
    monkeypatch: pytest.MonkeyPatch,
    verdict: Verdict,
    hunted: set[Verdict],
    user: int,
    is_killed: bool,
) -> None:
    """An orphan without an owner may be of an operator. Each is counted, for the proof that a service is over."""
    killed: list[proc.Stat] = []
    monkeypatch.setattr(programs.ownership, "attribute", lambda *_: verdict)
    monkeypatch.setattr(process, "kill_group_of", killed.append)
    monkeypatch.setattr(proc, "user", lambda _: user)
    monkeypatch.setattr("agent_shim.supervisor.ownership.is_job_user", lambda number: number != 0)
    programs._hunted = hunted

    programs._has_ended(ORPHAN)

    assert killed == [ORPHAN] * is_killed
    assert programs._count_of(["web", Unproven.ORPHAN]) == (verdict in {"web", Unproven.ORPHAN})
    assert programs._count_of(["other", Unproven.ORPHAN]) == (verdict is Unproven.ORPHAN)


async def test_orphans_are_hunted_while_they_are_swept_and_no_longer(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First they are asked to end; afterwards an orphan's group is left alone again."""
    sent: list[int] = []
    hunted: list[bool] = []

    async def strays(_: int) -> list[Left]:
        hunted.append(Unproven.ORPHAN in programs._hunted)
        return [] if signal.SIGKILL in sent else [Left(7, 1000, "orphan")]

    monkeypatch.setattr(programs, "strays", strays)
    monkeypatch.setattr(process, "send", lambda _, sig: sent.append(sig))
    monkeypatch.setattr(proc, "stat", lambda _: None)

    assert await programs.sweep_strays(0, 0.0) == []

    assert sent == [signal.SIGTERM, signal.SIGKILL]
    assert hunted == [False, False, True]
    assert programs._hunted == set()


@pytest.mark.parametrize("left", [[], [Left(9, 90, "web")]])
async def test_a_start_follows_only_an_end_of_the_last_run(
    programs: Programs, monkeypatch: pytest.MonkeyPatch, left: list[Left]
) -> None:
    """A kill then is usual; a process that survives it may hold a port."""
    usual: list[bool] = []

    async def members(*_: object) -> list[Identity]:
        return [(9, 90)]

    async def sweep(*_: object, is_usual: bool) -> list[Left]:
        usual.append(is_usual)
        return left

    monkeypatch.setattr(ctl_programs, "EXIT_WAIT_S", -1.0)
    monkeypatch.setattr(programs, "members", members)
    monkeypatch.setattr(programs, "sweep", sweep)
    refused = pytest.raises(HostError, match=r"cannot end remaining processes of the last run: 9 \(web\)")
    with refused if left else contextlib.nullcontext():
        await programs.clear("web", ProcessRecord(), 0.0)

    assert usual == [True]


async def test_the_wait_for_processes_ends_with_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with the number of one that has exited is another."""
    one = proc.Stat(7, "S", 1, 7, 7, 0, 70, 0)
    seen = iter([one, one, msgspec.structs.replace(one, start_ticks=71)])
    monkeypatch.setattr(proc, "stat", lambda _: next(seen))

    await ctl_programs._all_gone([(7, 70)], 60.0)

    assert next(seen, "none") == "none"


async def test_a_bucket_fills_by_the_time_since_the_last_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not again by the time before it."""
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    bucket = TokenBucket(5, 1)
    for _ in range(5):
        await bucket.take()
    left = []
    for _ in range(3):
        now[0] += 1.0
        await bucket.take()
        left.append(bucket._left)

    assert left == [0.0] * 3


async def test_descendants_are_recorded_while_any_are_known(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of a process that has ended; nothing is read for services in a cgroup or without processes."""
    looks = []

    async def look() -> Look:
        looks.append(1)
        table = {8: proc.Stat(8, "S", 1, 8, 8, 0, 1000, 0)}
        return Look(table, proc.children(table), {}, {})

    monkeypatch.setattr(programs, "_look", look)
    traces = ProcessRecord()
    programs.ownership.records = lambda: [("web", traces)]
    await programs.see_kin()
    traces.is_caged, traces.known = True, (8, 1000)
    await programs.see_kin()
    assert looks == []

    traces.is_caged, traces.known, traces.kin = False, None, [(8, 1000), (9, 1000)]
    await programs.see_kin()
    assert (looks, traces.kin) == ([1], [(8, 1000)])


@pytest.mark.parametrize(("is_bpm", "removed"), [(False, ["web"]), (True, [])])
async def test_the_cgroup_of_a_stopped_service_goes(
    programs: Programs, monkeypatch: pytest.MonkeyPatch, is_bpm: bool, removed: list[str]
) -> None:
    """That of a bpm process stays until its counters are read."""
    found: list[str] = []
    monkeypatch.setattr(programs.ownership, "cage", lambda label: SimpleNamespace(remove=lambda: found.append(label)))
    call = BpmCall("start", "web", "web") if is_bpm else None

    await programs.dismiss(ProcessSpec("web", "web", start=Program(("ctl",), bpm=call)))
    await programs.dismiss(ProcessSpec("web", "web"))

    assert found == removed


@pytest.fixture
def members(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> list[Members]:
    """Results of the passes, the last for all further ones; the kernel hides the last pid, and no pass pauses."""
    found = [Members([], [])]

    async def find(*_: object) -> Members:
        return found.pop(0) if len(found) > 1 else found[0]

    monkeypatch.setattr(ctl_programs, "PROOF_PAUSE_S", 0.0)
    monkeypatch.setattr(programs, "_members", find)
    monkeypatch.setattr(proc, "last_number", lambda: None)
    monkeypatch.setattr(proc, "name", str)
    monkeypatch.setattr(process, "takes_orphans", True)
    monkeypatch.setattr(reaper, "reap_some", lambda: False)
    return found


async def left_over(programs: Programs, traces: ProcessRecord, cage: SimpleNamespace = EMPTY) -> list[str]:
    return [str(each)[:19] for each in await programs._left_over("web", traces, cast("Any", cage))]


@pytest.mark.parametrize("verdict", ["web", Unproven.ORPHAN, "other"])
async def test_a_service_whose_processes_come_and_go_is_not_over(
    programs: Programs, members: list[Members], monkeypatch: pytest.MonkeyPatch, verdict: Verdict
) -> None:
    """Each pass finds none, and one more has ended meanwhile: a process outruns the passes."""
    numbers = iter(range(10_000))
    find = programs._members

    async def ending(*called: Any) -> Members:
        programs._ended[verdict] += 1
        return await find(*called)

    monkeypatch.setattr(proc, "last_number", lambda: next(numbers))
    assert await left_over(programs, ProcessRecord(begun=1)) == []
    monkeypatch.setattr(programs, "_members", ending)

    assert await left_over(programs, ProcessRecord(begun=1)) == ([] if verdict == "other" else ["processes that exit"])


async def test_an_orphan_that_exits_proves_nothing(programs: Programs, members: list[Members]) -> None:
    """It may have left a child. The next pass decides; an orphan whose exit does not end is named."""
    members[:] = [Members([], [], [(8, 80)]), Members([], [], [(9, 90)]), Members([(7, 70)], [])]
    assert await left_over(programs, ProcessRecord(begun=1)) == ["7 (7)"]

    members[:] = [Members([], [], [(8, 80)]), Members([], [])]
    assert await left_over(programs, ProcessRecord(begun=1)) == []

    members[:] = [Members([], [], [(8, 80)])]
    assert await left_over(programs, ProcessRecord(begun=1)) == ["8 (8)"]


@pytest.mark.parametrize(
    ("ends", "are_more", "is_quiet", "turns"),
    [
        ([], [True, True, False], True, 3),
        (["other"], [True, True, False], True, 3),
        (["web"], [True, True, False], False, 1),
        (["web"], [False], False, 1),
        ([], [True] * 200, False, 100),
    ],
)
async def test_what_has_exited_is_reaped_before_a_pass_counts(
    programs: Programs,
    monkeypatch: pytest.MonkeyPatch,
    ends: list[str],
    are_more: list[bool],
    is_quiet: bool,
    turns: int,
) -> None:
    """In turns of the event loop, and not without end where as many exit as are reaped."""
    most = len(are_more)
    seen: list[int] = []

    def reap_some() -> bool:
        programs._ended.update(ends)
        return are_more.pop(0)

    monkeypatch.setattr(reaper, "reap_some", reap_some)
    asyncio.get_running_loop().call_soon(lambda: seen.append(most - len(are_more)))

    assert await programs._none_ended(["web", Unproven.ORPHAN], 0) is is_quiet
    assert most - len(are_more) == turns
    assert seen == ([1] if most > 1 else [])


@pytest.mark.parametrize(
    ("begun", "are_taken", "last", "births", "passes"),
    [
        (60, True, None, 0, 1),
        (40, True, None, 0, 40),
        (60, False, None, 0, 40),
        (40, True, 5, 0, 1),
        (60, False, 5, 0, 1),
        (40, True, 5, 1, 40),
    ],
)
async def test_many_passes_prove_the_end_of_a_service_whose_orphans_go_elsewhere(
    programs: Programs,
    members: list[Members],
    monkeypatch: pytest.MonkeyPatch,
    begun: int,
    are_taken: bool,
    last: int | None,
    births: int,
    passes: int,
) -> None:
    """Those of an earlier agent do. One pass suffices during which no process has started; its own threads are none."""
    members[:] = [Members([], [])] * 50
    find = programs._members
    born = 0

    async def reading(*called: Any) -> Members:
        nonlocal born
        born += births
        proc.readers += 1
        return await find(*called)

    monkeypatch.setattr(programs, "_members", reading)
    monkeypatch.setattr(proc, "last_number", lambda: last and last + born + proc.readers)
    monkeypatch.setattr(process, "takes_orphans", are_taken)
    programs._counts_since = 50

    assert await left_over(programs, ProcessRecord(begun=begun)) == []
    assert 50 - len(members) == passes


async def test_a_service_is_not_over_while_a_process_is_found(
    programs: Programs, members: list[Members], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its cgroup or by a pass."""
    caged = SimpleNamespace(is_empty=lambda: False, members=list)
    monkeypatch.setattr(process, "KILL_TIMEOUT_S", -1.0)
    async with asyncio.timeout(10):
        assert await left_over(programs, ProcessRecord(is_caged=True), caged) == ["processes that exit"]
    caged.members = lambda: [(8, 80)]
    assert await left_over(programs, ProcessRecord(is_caged=True), caged) == ["8 (8)"]

    members[:] = [Members([(9, 90)], [])]
    assert await left_over(programs, ProcessRecord(begun=1)) == ["9 (9)"]
    assert await left_over(programs, ProcessRecord(is_caged=True)) == []


@pytest.mark.parametrize("ended", [0, 1])
async def test_no_orphan_is_listed_only_with_proof(
    programs: Programs,
    monkeypatch: pytest.MonkeyPatch,
    members: list[Members],
    caplog: pytest.LogCaptureFixture,
    ended: int,
) -> None:
    """Orphans that exit before they can be listed are reported without a number, and hunted; none gets a signal."""
    hunted: list[bool] = []

    async def look() -> None:
        hunted.append(Unproven.ORPHAN in programs._hunted)
        programs._ended[Unproven.ORPHAN] += ended

    monkeypatch.setattr(programs, "_look", look)
    monkeypatch.setattr(programs.ownership, "strays", lambda *_: Members([], []))

    assert [str(each)[:19] for each in await programs.sweep_strays(0, 0.0)] == ["processes that exit"] * ended
    assert ("sending SIGKILL to orphans of jobs: processes that exit" in caplog.text) is bool(ended)
    assert any(hunted) is bool(ended)
    assert programs._hunted == set()


@pytest.mark.parametrize(
    ("over_at", "is_usual", "left", "kills"),
    [
        (1, False, [], 0),
        (2, False, [], 0),
        (5, False, [], 3),
        (5, True, [], 3),
        (None, False, ["processes that exit"], 3),
    ],
)
async def test_a_sweep_ends_with_the_proof_that_a_service_is_over(
    programs: Programs,
    monkeypatch: pytest.MonkeyPatch,
    over_at: int | None,
    is_usual: bool,
    left: list[str],
    kills: int,
) -> None:
    """Passes that find no process prove nothing. A kill hunts its orphans meanwhile; an unusual one is recorded."""
    proofs: list[bool] = []
    hunted: list[set[Verdict]] = []
    cage = SimpleNamespace(kill=lambda: hunted.append(set(programs._hunted)))

    async def members(*_: object) -> list[Identity]:
        return []

    async def left_over(*_: object) -> list[Left]:
        proofs.append(len(proofs) + 1 == over_at)
        return [] if proofs[-1] else [ctl_programs.NAMELESS]

    monkeypatch.setattr(programs, "members", members)
    monkeypatch.setattr(programs, "_left_over", left_over)
    monkeypatch.setattr(programs.ownership, "cage", lambda _: cage)

    found = await programs.sweep("web", ProcessRecord(), (), 0.0, is_usual=is_usual)

    assert [str(each)[:19] for each in found] == left
    assert hunted == [{"web"}] * kills
    assert programs.killed == ({"web"} if kills and not is_usual else set())
    assert programs._hunted == set()


async def test_a_process_that_only_the_proof_finds_is_signalled_in_the_same_round(
    programs: Programs, members: list[Members], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was born after the pass that found none."""
    caplog.set_level("INFO")
    sent: list[object] = []
    monkeypatch.setattr(process, "send", lambda *each: sent.append(each))
    monkeypatch.setattr(proc, "stat", lambda _: None)
    monkeypatch.setattr(programs.ownership, "cage", lambda _: EMPTY)
    members[:] = [Members([], []), *[Members([(9, 90)], [])] * 2, Members([], [])]

    assert await programs.sweep("web", ProcessRecord(begun=1), (), 0.1) == []
    assert sent == [((9, 90), signal.SIGTERM)]
    assert "web: sending SIGTERM to remaining processes: 9" in caplog.text


async def test_callers_share_a_pass_that_begins_after_their_call(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later one takes its own: an older one shows no process that has started since."""
    looks: list[Look] = []

    def look(_: object) -> Look:
        looks.append(Look({}, {}, {}, {}))
        return looks[-1]

    monkeypatch.setattr(ctl_programs, "look", look)

    first, second = await asyncio.gather(programs._look(), programs._look())
    third = await programs._look()
    assert (first is second, third is first, len(looks)) == (True, False, 2)


def test_orphans_are_counted_for_the_services_of_the_block(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no longer after it. Those of a service that began before it went elsewhere."""
    traces = ProcessRecord()
    monkeypatch.setattr(clock, "boot_ticks", lambda: 50)

    with programs.counting(lambda: [("web", traces)]):
        assert list(programs.ownership.records()) == [("web", traces)]
        assert programs._counts_since == 50


async def test_orphans_are_attributed_only_during_a_search(programs: Programs) -> None:
    """At other times one costs only its reaping; searches overlap."""
    assert programs._has_ended not in reaper.heirs
    with programs._attending("web"):
        with programs._attending():
            assert reaper.heirs.count(programs._has_ended) == 1
        assert (reaper.heirs.count(programs._has_ended), programs._hunted) == (1, {"web"})

    assert (reaper.heirs.count(programs._has_ended), programs._hunted) == (0, set())


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
