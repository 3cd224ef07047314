"""Decisions about processes that remain and about output; ``integration/test_ctl_programs.py`` runs programs."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent_shim.host import proc, process
from agent_shim.supervisor import ctl_programs
from agent_shim.supervisor.ctl_programs import MAX_OUTPUT_BYTES, Programs
from agent_shim.supervisor.ownership import Left, Look, Unproven, Verdict
from agent_shim.supervisor.plan import BpmCall, ProcessSpec, Program
from agent_shim.supervisor.process_record import Identity, ProcessRecord

ORPHAN = proc.Stat(7, "Z", 1, 7, 7, 0, 1000, 0)


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
    assert programs._count_of("web") == (verdict in {"web", Unproven.ORPHAN})
    assert programs._count_of("other") == (verdict is Unproven.ORPHAN)


class Held:
    """A process that ends with a KILL."""

    def __init__(self, sent: list[signal.Signals]) -> None:
        self.pid = 7
        self._sent = sent

    @property
    def is_alive(self) -> bool:
        return signal.SIGKILL not in self._sent

    def send(self, sig: signal.Signals) -> None:
        self._sent.append(sig)

    def release(self) -> None:
        """Nothing is held."""


async def test_orphans_are_hunted_while_they_are_swept_and_no_longer(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First they are asked to end; afterwards an orphan's group is left alone again."""
    sent: list[signal.Signals] = []
    hunted: list[bool] = []

    async def strays(_: int) -> list[Left]:
        hunted.append(Unproven.ORPHAN in programs._hunted)
        return [] if signal.SIGKILL in sent else [Left(7, 1000, "orphan")]

    monkeypatch.setattr(programs, "strays", strays)
    monkeypatch.setattr(process, "adopt", lambda *_: Held(sent))

    assert await programs.sweep_strays(0, 0.0) == []

    assert sent == [signal.SIGTERM, signal.SIGKILL]
    assert hunted == [False, False, True, False]


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


async def test_a_service_whose_processes_come_and_go_is_not_over(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pass finds none, and one more has ended meanwhile: a process outruns the passes."""
    numbers = iter(range(10_000))

    async def members(*_: object) -> list[Identity]:
        if ends:
            programs._ended["web"] += 1
        return []

    monkeypatch.setattr(ctl_programs, "PROOF_PAUSE_S", 0.0)
    monkeypatch.setattr(programs, "members", members)
    monkeypatch.setattr(proc, "last_number", lambda: next(numbers))
    monkeypatch.setattr(process, "takes_orphans", True)
    cage: Any = SimpleNamespace(is_empty=lambda: True, members=list)

    for ends in (True, False):
        assert await programs._is_over("web", ProcessRecord(begun=1), cage) is not ends


def test_only_large_output_is_cut(programs: Programs, tmp_path: Path) -> None:
    """To its end, which holds the last words."""
    large = b"".join(b"%d\n" % number for number in range(60_000))
    assert len(large) > MAX_OUTPUT_BYTES
    for name, content in (("large.log", large), ("small.log", b"x\n"), ("full.log", bytes(MAX_OUTPUT_BYTES))):
        (tmp_path / name).write_bytes(content)
    (tmp_path / "other").write_bytes(large)

    programs.trim()

    assert (tmp_path / "large.log").read_bytes() == large[-MAX_OUTPUT_BYTES // 2 :]
    assert (tmp_path / "small.log").read_bytes() == b"x\n"
    assert (tmp_path / "full.log").stat().st_size == MAX_OUTPUT_BYTES
    assert (tmp_path / "other").read_bytes() == large
