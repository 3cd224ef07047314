"""Owners of processes, by their attributes, without cgroups."""

from __future__ import annotations

import os
import pwd
from collections.abc import Collection, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TypeAlias

import pytest

from agent_shim.host import clock, job_cgroups, proc, process
from agent_shim.supervisor import posix_regex
from agent_shim.supervisor.ownership.evidence import Evidence, Look, Ownership, Tie, Unproven, is_job_user, kinship
from agent_shim.supervisor.ownership.process_record import (
    MARK,
    MAX_SESSIONS,
    MONIT_MARK,
    Identity,
    Pidfile,
    ProcessRecord,
    Session,
    mark,
    read,
    rule_label,
    script_label,
)

BASE = Path("/var/vcap")
USER = 4711
US = 4242
"""The agent, whatever process runs the tests."""
Kernel: TypeAlias = dict[int, tuple[proc.Stat, Mapping[str, str], str]]
"""Processes by number: what they are, their environment, their command line."""
OLD = Pidfile(50, 1.0, 7)
NEW = Pidfile(50, 2.0, 7)


def stat(pid: int, parent: int = 1, session: int = 0, start: int = 1000, state: str = "S") -> proc.Stat:
    return proc.Stat(pid, state, parent, pid, session, 0, start, 0)


@pytest.fixture(autouse=True)
def _the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: US)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """Processes as we say they are."""
    processes: Kernel = {}
    monkeypatch.setattr(proc, "stat", lambda pid: processes[pid][0] if pid in processes else None)
    monkeypatch.setattr(proc, "variable", lambda pid, name: processes[pid][1].get(name) if pid in processes else None)
    monkeypatch.setattr(proc, "command_line", lambda pid: processes[pid][2] if pid in processes else "")
    monkeypatch.setattr(job_cgroups, "tracker", lambda: None)
    monkeypatch.setattr(proc, "user", lambda _: USER)
    monkeypatch.setattr(proc, "command_lines", lambda pids: {pid: processes[pid][2] for pid in pids})

    def census(name: str, known: Collection[int]) -> proc.Census:
        table, marked = {pid: entry[0] for pid, entry in processes.items()}, dict[str, set[int]]()
        for pid, (_, environ, _) in processes.items():
            if name in environ and pid not in known:
                marked.setdefault(environ[name], set()).add(pid)
        return proc.Census(table, proc.children(table), marked, frozenset())

    monkeypatch.setattr(proc, "census", census)
    monkeypatch.setattr(clock, "wall_time_of", lambda ticks: ticks / 100)
    return processes


def own(process: proc.Stat, traces: ProcessRecord, pidfile: Pidfile) -> bool:
    """Return True if web owns the process that its pidfile names."""
    ownership = Ownership(BASE)
    ownership.records = lambda: [("web", traces)]
    return ownership.tie(process, "web", "web", traces, pidfile)[0] is Tie.OWNED


@pytest.fixture(autouse=True)
def leaving(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Processes that exit."""
    found: set[int] = set()
    monkeypatch.setattr(proc, "is_leaving", found.__contains__)
    return found


def members(
    processes: Mapping[int, proc.Stat],
    traces: ProcessRecord,
    marked: Mapping[str, set[int]] = {},
    known: Collection[Identity] = (),
    others: Mapping[str, ProcessRecord] = {},
) -> set[int]:
    """The numbers of the processes of web, which has the sessions that they began from then on."""
    ownership = Ownership(BASE)
    ownership.records = lambda: [("web", traces), *others.items()]
    seen = Look(processes, proc.children(processes), marked, frozenset(), {})
    found = ownership.members(seen, "web", traces, known)
    for each in found.leads:
        traces.widen(each)
    return {pid for pid, _ in found.identities}


@pytest.mark.attack("a job puts a link into a path in which root creates, opens or gives away files")
def test_pidfile_must_be_a_regular_file(tmp_path: Path) -> None:
    """A missing file, a directory and a fifo do not count, even if the fifo would block or contains a number."""
    os.mkfifo(tmp_path / "fifo")
    os.mkfifo(tmp_path / "full")
    (tmp_path / "link").symlink_to("full")
    pipe = os.open(tmp_path / "full", os.O_RDWR)
    os.write(pipe, b"50\n50\n")

    assert read(tmp_path / "none") is None
    assert read(tmp_path) is None
    assert read(tmp_path / "fifo") is None
    assert read(tmp_path / "full") is None
    assert read(tmp_path / "link") is None
    os.close(pipe)


@pytest.mark.parametrize(
    ("environment", "is_ours"),
    [
        ({MARK: mark("web", BASE)}, True),
        ({MARK: mark("other", BASE)}, False),
        ({MARK: mark("web", Path("/tmp/world"))}, False),
        ({MONIT_MARK: "web"}, True),
        ({MONIT_MARK: "other"}, False),
        ({MARK: mark("other", BASE), MONIT_MARK: "web"}, False),
        ({}, False),
    ],
)
def test_mark_decides_whether_a_pidfile_is_believed(
    kernel: Kernel, environment: Mapping[str, str], is_ours: bool
) -> None:
    """An old process that the pidfile names is believed only because of its mark."""
    kernel[50] = stat(50), environment, "sleep 600"

    assert own(kernel[50][0], ProcessRecord(), OLD) is is_ours


@pytest.mark.attack("a job names a process of root or of another job in its pidfile")
@pytest.mark.parametrize(
    ("process", "owner", "is_ours"),
    [
        (stat(50, parent=US, start=1000), 0, True),
        (stat(50, parent=US, start=999), 0, False),
        (stat(50, parent=1, start=1000), 0, False),
        (stat(50, parent=US, start=1000), USER, True),
        (stat(50, parent=US, start=1000), 1000, True),
        (stat(50, parent=US, start=1000), USER + 1, False),
    ],
)
def test_unmarked_process_in_a_new_pidfile_must_have_started_since_the_start(
    kernel: Kernel,
    monkeypatch: pytest.MonkeyPatch,
    process: proc.Stat,
    owner: int,
    is_ours: bool,
) -> None:
    """It must also descend from the agent, and be one that the owner of the pidfile could signal."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    traces = ProcessRecord()
    traces.begin((40, 1000), OLD)
    kernel[50] = process, {}, ""

    assert own(process, traces, NEW._replace(owner=owner)) is is_ours
    assert not own(process, traces, OLD)


def test_ancestor_of_a_process_may_have_a_low_pid(kernel: Kernel) -> None:
    """This happens in a small container."""
    kernel[2], kernel[50] = (stat(2), {}, ""), (stat(50, parent=2), {}, "")

    assert own(kernel[50][0], ProcessRecord(known=(2, 1000)), NEW)


def test_recorded_process_is_believed(kernel: Kernel) -> None:
    """Number and start time must both match."""
    traces = ProcessRecord(known=(50, 1000))

    assert own(stat(50, start=1000), traces, OLD)
    kernel[50] = stat(50, start=1001), {}, ""
    assert not own(stat(50, start=1001), traces, OLD)


def test_process_is_recognized_by_descent_or_session(kernel: Kernel) -> None:
    """It has cleared its environment, and there is no other evidence."""
    traces = ProcessRecord()
    traces.begin((40, 1000), NEW)
    kernel[40] = stat(40, session=40), {}, ""
    kernel[41] = stat(41, parent=40, session=99), {}, ""

    assert own(stat(50, parent=41, session=99), traces, NEW)
    assert own(stat(50, session=40), traces, NEW)
    assert not own(stat(50, session=39), traces, NEW)
    kernel[40] = stat(40, session=40, start=5000), {}, ""
    assert not own(stat(50, session=40, start=6000), traces, NEW)


@pytest.mark.attack("a job has a dead service counted as running by naming an operator's program")
@pytest.mark.parametrize(
    ("start", "line", "executable", "owner", "is_named"),
    [
        (90, "/var/vcap/packages/web/bin/web -d", "/bin/sh", 0, True),
        (90, "/var/vcap/packages/web/bin/web -d", "/bin/sh", USER, True),
        (150, "/var/vcap/packages/web/bin/web -d", "/bin/sh", 0, False),
        (90, "/usr/sbin/sshd -D", "/usr/sbin/sshd", 0, False),
        (90, "/var/vcapx/bin/web", "/var/vcapx/bin/web", 0, False),
        (90, "tail -f /var/vcap/sys/log/web/web.log", "/usr/bin/tail", USER + 1, False),
        (90, "agent-shim logs", "/var/vcap/bosh/bin/python3", USER + 1, False),
        (90, "web -d", "/var/vcap/data/packages/web/1/bin/web", USER + 1, True),
        (150, "web -d", "/var/vcap/data/packages/web/1/bin/web", USER + 1, False),
    ],
)
def test_process_started_by_hand_is_watched_but_not_signalled(
    kernel: Kernel,
    monkeypatch: pytest.MonkeyPatch,
    start: int,
    line: str,
    executable: str,
    owner: int,
    is_named: bool,
) -> None:
    """It existed when the pidfile was written, and is a program of a job."""
    kernel[50] = stat(50, start=start), {}, line
    monkeypatch.setattr(proc, "executable", lambda _: executable)

    tie, why = Ownership(BASE).tie(kernel[50][0], "web", "web", ProcessRecord(), OLD._replace(owner=owner))
    assert tie is (Tie.NAMED if is_named else Tie.NONE)
    assert bool(why) is not is_named


def test_strongest_evidence_of_the_table_decides(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first matching row decides. Each change adds stronger evidence to that before it."""
    one = stat(50, parent=1, start=100)
    traces, pidfile = ProcessRecord(), Pidfile(50, 2.0, 7, USER)
    ownership = Ownership(BASE)
    records: list[tuple[str, ProcessRecord]] = [("web", traces)]
    ownership.records = lambda: records
    decided: list[Evidence] = []

    def decide(each: proc.Stat = one, **environment: str) -> None:
        kernel[50] = each, environment, line
        decided.append(ownership.evidence(each, "web", script_label("web"), traces, pidfile)[0])

    line = ""
    decide()
    line = "tail -f /var/vcap/sys/log/web/web.log"
    decide()
    monkeypatch.setattr(proc, "executable", lambda _: "/var/vcap/data/packages/web/1/bin/web")
    decide()
    orphan = stat(50, parent=US, start=100)
    traces.begin((40, 90), None)
    decide(orphan)
    decide(orphan, **{MARK: mark(script_label("web"), BASE)})
    monkeypatch.setattr(process, "is_spawned", lambda identity: identity == orphan.identity)
    decide(orphan)
    records.append(("other", ProcessRecord(descendants=[orphan.identity])))
    decide(orphan)
    records[1:] = [(rule_label("other"), ProcessRecord(descendants=[orphan.identity]))]
    decide(orphan)
    records[1:] = [(script_label("web"), ProcessRecord(descendants=[orphan.identity]))]
    decide(orphan)
    traces.descendants = [orphan.identity]
    decide(orphan)
    monkeypatch.setattr(ownership, "label_of", lambda _: "web")
    decide(orphan)
    decide(stat(1, parent=0, start=1))
    traces.named_by = pidfile
    decide(orphan)

    assert decided == list(Evidence)[::-1]


def test_process_of_scripts_claimed_by_a_service_belongs_to_no_other(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cgroup is still that of the scripts, and so is that of its children."""
    table = {50: stat(50, parent=US), 51: stat(51, parent=50), 52: stat(52, parent=US)}
    kernel.update({pid: (one, {}, "") for pid, one in table.items()})
    scripts = script_label("web")
    ownership = Ownership(BASE)
    ownership.records = lambda: [("other", ProcessRecord(known=(50, 1000)))]
    monkeypatch.setattr(ownership, "label_of", lambda _: scripts)

    assert [ownership.verdict(one) for one in table.values()] == ["other", "other", scripts]
    assert kinship(table, ownership.records(), dict.fromkeys(table, scripts)) == {
        50: "other",
        51: "other",
        52: scripts,
    }


def test_service_members_are_found_by_mark_session_descent_and_record() -> None:
    """Each kind of evidence finds a process.

    Not those of others, whatever their marks, no zombie, not the agent.
    """
    processes = [
        stat(10, session=10, start=100),
        stat(11, session=10, start=101),
        stat(12, parent=11, session=12, start=102),
        stat(13, session=13, start=103),
        stat(14, parent=13, session=13, start=104),
        stat(15, session=10, start=105),
        stat(16, session=10, start=99),
        stat(17, state="Z", session=10, start=106),
        stat(18, session=18, start=107),
        stat(19, session=19, start=108),
        stat(20, session=20, start=109),
        stat(US, session=10, start=109),
    ]
    table = {process.pid: process for process in processes}
    marked = {mark("web", BASE): {13, 20}, mark("other", BASE): {15}}
    traces = ProcessRecord(known=(18, 107), sessions=[Session(10, 100)])
    others = {"other": ProcessRecord(known=(20, 109))}

    assert members(table, traces, marked, [(19, 999)], others) == {10, 11, 12, 13, 14, 15, 18}


@pytest.mark.parametrize(
    ("session", "is_ours"),
    [
        (Session(10, 100), False),
        (Session(10, 100, seen=151), True),
        (Session(10, 100, seen=150), False),
        (Session(10, 100, seen=99, is_led=False), False),
    ],
)
def test_session_without_its_leader_is_valid_while_a_known_process_is_in_it(session: Session, is_ours: bool) -> None:
    """Otherwise its number may be another session's."""
    table = {11: stat(11, session=10, start=150), 12: stat(12, session=10, start=900)}
    traces = ProcessRecord(sessions=[session])

    assert members(table, traces) == ({11, 12} if is_ours else set())
    table[10] = stat(10, session=10, start=5000)
    assert members(table, ProcessRecord(sessions=[Session(10, 100)])) == set()


def test_session_is_valid_while_a_known_or_marked_process_is_in_it() -> None:
    """The known process is in it, or one with the agent's mark."""
    table = {11: stat(11, session=10, start=150), 12: stat(12, session=10, start=900)}
    known = ProcessRecord(known=(11, 150), sessions=[Session(10, 100)])
    plain = ProcessRecord(sessions=[Session(10, 100)])
    marked = {mark("web", BASE): {11}}

    assert members(table, known) == {11, 12}
    assert members(table, plain, marked) == {11, 12}


def test_descendants_of_an_exited_process_still_belong_to_the_service() -> None:
    """Another process with such a number does not."""
    table = {process.pid: process for process in (stat(10, start=100), stat(11, parent=10), stat(12, parent=11))}
    traces = ProcessRecord(known=(10, 100))
    verdicts = kinship(table, [("web", traces)], {})
    traces.record_descendants(table[pid].identity for pid, verdict in verdicts.items() if verdict == "web")
    assert traces.descendants == [(11, 1000), (12, 1000)]
    traces.ended((10, 100), 0, 2000)
    table = {11: stat(11), 12: stat(12, start=3000), 13: stat(13, start=3000)}

    assert members(table, traces) == {11}


def test_cgroup_overrides_all_other_evidence() -> None:
    """A process in another job's cgroup is the other's, even if recorded, a descendant, or in the agent's session."""
    table = {10: stat(10, session=10, start=100), 11: stat(11, parent=10, session=10, start=101), 12: stat(12)}
    traces = ProcessRecord(known=(10, 100), sessions=[Session(10, 100)])

    assert kinship(table, [("web", traces)], {11: "other", 12: "web"}) == {
        10: "web",
        11: "other",
        12: "web",
    }


def test_processes_of_the_agent_belong_to_no_job() -> None:
    """A process of unknown origin that some job left belongs to none either, until its mark says more."""
    table = {
        1: stat(1, parent=0, start=1),
        US: stat(US, start=2),
        10: stat(10, parent=US, start=100),
        11: stat(11, parent=10, start=200),
        12: stat(12, parent=1, start=100),
    }
    ownership = Ownership(BASE)
    ownership.records = lambda: [("web", ProcessRecord())]
    verdicts = kinship(table, [("web", ProcessRecord())], {})

    assert verdicts == {
        1: Unproven.AGENTS,
        US: Unproven.AGENTS,
        10: Unproven.ORPHAN,
        11: Unproven.ORPHAN,
        12: Unproven.FOREIGN,
    }


def test_exited_session_leader_is_not_confused_with_a_new_process() -> None:
    """Another process with its number, even from the same clock tick, is unrelated."""
    traces = ProcessRecord()
    traces.begin((10, 100), None)
    table = {10: stat(10, session=10, start=100), 11: stat(11, session=10, start=100)}
    assert members(table, traces) == {10, 11}
    traces.ended((10, 100), 10, 100)

    assert members(table, traces) == set()


def test_pidfile_names_only_the_process_that_it_was_written_for(kernel: Kernel) -> None:
    """When that has exited, a later process with its number is not the service, even if younger than the start."""
    traces = ProcessRecord()
    traces.begin((40, 1000), OLD)
    kernel[50] = stat(50, parent=US, start=1001), {}, ""
    assert own(kernel[50][0], traces, NEW)
    traces.known, traces.named_by = (50, 1001), NEW
    traces.ended((50, 1001), 0, 1100)
    kernel[50] = stat(50, parent=US, start=1100), {}, ""

    assert not own(kernel[50][0], traces, NEW)
    assert own(kernel[50][0], traces, Pidfile(50, 3.0, 7))


def test_pattern_prefers_the_known_and_then_the_oldest_process(kernel: Kernel) -> None:
    """The start program is used only if nothing else matches, and a process with another mark never is."""
    kernel[40] = stat(40, start=100), {MARK: mark("web", BASE)}, "sh web start"
    kernel[41] = stat(41, start=101), {}, "web --serve"
    kernel[42] = stat(42, start=102), {}, "web --serve"
    kernel[43] = stat(43, start=90), {MARK: mark("other", BASE)}, "web --serve"
    traces = ProcessRecord(program=(40, 100))
    pattern = posix_regex.compiled("web")
    ownership = Ownership(BASE)

    def matched() -> tuple[int, Tie] | None:
        found = ownership.match(pattern, "web", "web", traces)
        return (found[0].pid, found[1]) if found else None

    assert matched() == (41, Tie.NAMED)
    traces.known = (42, 102)
    assert matched() == (42, Tie.OWNED)
    del kernel[41], kernel[42]
    assert matched() == (40, Tie.OWNED)
    del kernel[40]
    assert matched() is None
    kernel[1], kernel[US] = (stat(1), {}, "web init"), (stat(US), {}, "web agent")
    assert matched() is None


def test_old_pidfile_does_not_match_a_start_program_with_a_reused_pid(kernel: Kernel) -> None:
    """Otherwise it would be taken for the process that it starts, and later the next one with that number."""
    kernel[50] = (stat(50), {MARK: mark("web", BASE)}, "")
    traces = ProcessRecord()
    traces.begin((50, 1000), OLD)

    assert not own(kernel[50][0], traces, OLD)
    assert own(kernel[50][0], traces, NEW)


def test_parent_younger_than_its_child_is_not_its_parent() -> None:
    """The real parent's number is reused, so nothing is inherited from its new owner."""
    table = {10: stat(10, start=200), 11: stat(11, parent=10, start=100), 12: stat(12, parent=10, start=200)}
    traces = ProcessRecord(known=(10, 200))

    assert kinship(table, [("web", traces)], {}) == {10: "web", 11: Unproven.FOREIGN, 12: "web"}


def test_cyclic_parents_in_a_process_table_are_tolerated() -> None:
    """A table that is read while numbers are reused may contain a cycle."""
    table = {10: stat(10, parent=11), 11: stat(11, parent=10)}

    assert kinship(table, (), {}) == {10: Unproven.FOREIGN, 11: Unproven.FOREIGN}


@pytest.mark.parametrize(
    ("cgroup", "tie", "why"),
    [
        (mark("web", BASE), Tie.OWNED, ""),
        (mark("other", BASE), Tie.NONE, "it belongs to other"),
        (mark("web", Path("/tmp/world")), Tie.NONE, Evidence.NOTHING.value.why),
        (None, Tie.NONE, Evidence.NOTHING.value.why),
    ],
)
def test_cgroup_alone_is_sufficient_evidence(
    kernel: Kernel,
    monkeypatch: pytest.MonkeyPatch,
    cgroup: str | None,
    tie: Tie,
    why: str,
) -> None:
    """It counts without descent and session, and against the mark, which the process may have forged."""
    monkeypatch.setattr(job_cgroups, "name_of", lambda pid: cgroup if pid == 50 else None)
    kernel[50] = stat(50), {MARK: mark("third", BASE)}, ""
    ownership = Ownership(BASE)

    assert ownership.tie(kernel[50][0], "web", "web", ProcessRecord(), OLD) == (tie, why)


@pytest.mark.parametrize(
    ("ours", "user", "name", "is_of_a_job"),
    [
        (0, 1000, "vcap", True),
        (0, 1001, "bosh_3f2a", False),
        (0, 1002, None, True),
        (0, 0, "root", False),
        (0, None, None, False),
        (7, 7, "somebody", True),
        (7, 1001, "bosh_3f2a", True),
        (7, None, None, False),
    ],
)
def test_orphans_of_root_and_operators_belong_to_no_job(
    monkeypatch: pytest.MonkeyPatch, ours: int, user: int | None, name: str | None, is_of_a_job: bool
) -> None:
    """An agent without root has one user for all."""

    def account(number: int) -> SimpleNamespace:
        if name is None:
            raise KeyError(number)
        return SimpleNamespace(pw_name=name)

    monkeypatch.setattr(os, "geteuid", lambda: ours)
    monkeypatch.setattr(pwd, "getpwuid", account)

    assert is_job_user(user) is is_of_a_job


def test_session_is_proved_only_by_its_own_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "boot_ticks", lambda: 500)
    traces = ProcessRecord(
        sessions=[Session(10, 100, seen=200), Session(20, 100, seen=200), Session(30, 100, seen=900)]
    )
    traces.lives(10)
    traces.lives(30)

    assert [session.seen for session in traces.sessions] == [500, 200, 900]


@pytest.mark.parametrize(
    ("tie", "session", "leads"),
    [
        (Tie.OWNED, 10, True),
        (Tie.OWNED, 20, False),
        (Tie.OWNED, 30, True),
        (Tie.OWNED, 40, True),
        (Tie.OWNED, 50, True),
        (Tie.SHARED, 10, True),
        (Tie.SHARED, 50, False),
        (Tie.NAMED, 10, False),
    ],
)
def test_session_belongs_to_the_service_unless_led_by_a_foreign_process(
    kernel: Kernel, tie: Tie, session: int, leads: bool
) -> None:
    """Otherwise the session of an operator's shell would be ended with the job. Dead leaders do not count."""
    ownership = Ownership(BASE)
    ownership.records = lambda: [("web", ProcessRecord(known=(50, 1000)))]
    for each in (stat(20, session=20), stat(30, session=30, state="Z"), stat(50, session=50)):
        kernel[each.pid] = each, {}, ""
    one = stat(10, parent=50, session=session)
    kernel[10] = one, {}, ""

    assert ownership.leads_session(one, tie, "web") is leads


def test_process_in_a_cgroup_is_checked_only_against_its_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each of 200 services that start together would read the records of all."""
    ownership = Ownership(BASE)
    monkeypatch.setattr(ownership, "label_of", {10: "web", 1: "web", os.getpid(): "web"}.get)
    monkeypatch.setattr(ownership, "records", lambda: pytest.fail("they are read"))

    assert ownership.verdict(stat(10)) == "web"
    monkeypatch.setattr(ownership, "records", tuple)
    assert ownership.verdict(stat(os.getpid())) is Unproven.AGENTS
    assert ownership.verdict(stat(1)) is Unproven.AGENTS


def test_members_record_their_sessions_and_exclude_watched_processes() -> None:
    """A process that is only watched is not a member. A session is recorded if its leader is a member or has exited."""
    processes = [
        stat(10, session=10),
        stat(11, parent=10, session=10),
        stat(12, parent=10, session=12),
        stat(13, parent=12, session=99),
        stat(14, parent=12, session=20),
        stat(20, session=20),
    ]
    table = {process.pid: process for process in processes}
    traces, guest = ProcessRecord(known=(10, 1000)), ProcessRecord(known=(10, 1000), is_only_named=True)

    assert members(table, traces) == {10, 11, 12, 13, 14}
    assert sorted(traces.numbers()) == [10, 12, 99]
    assert members(table, guest) == set()


def test_recorded_session_starts_with_its_leader_or_oldest_member() -> None:
    """With a later start, older processes of the session would look foreign."""
    processes = [
        stat(10, session=10, start=100),
        stat(11, parent=10, session=10, start=100),
        stat(12, parent=11, session=99, start=105),
        stat(13, parent=11, session=99, start=103),
    ]
    traces = ProcessRecord(known=(10, 100))

    members({process.pid: process for process in processes}, traces)

    assert {session[:2]: session.is_led for session in traces.sessions} == {(10, 100): True, (99, 103): False}


def test_watched_process_with_the_mark_is_not_a_member() -> None:
    """A process can set its mark itself, and a stop would kill a member."""
    table = {10: stat(10), 11: stat(11, parent=10), 12: stat(12)}
    guest = ProcessRecord(known=(10, 1000), is_only_named=True)

    assert members(table, guest, {mark("web", BASE): {10, 12}}) == {11, 12}


def test_the_agent_is_a_member_of_no_job() -> None:
    """The init process is not either, whatever their marks or ancestors."""
    table = {pid: stat(pid, parent=10, session=10) for pid in (1, 3, US)} | {10: stat(10, session=10, start=900)}
    traces = ProcessRecord(known=(10, 900), sessions=[Session(10, 900)], descendants=[(1, 1000), (US, 1000)])

    assert members(table, traces, {mark("web", BASE): {1, US}}) == {3, 10}


def test_process_of_the_agent_itself_belongs_to_no_job(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its descendants do not either, even with a mark."""
    monkeypatch.setattr(process, "is_spawned", lambda identity: identity == (10, 1000))
    table = {10: stat(10, parent=US), 11: stat(11, parent=10)}
    assert kinship(table, (), {}) == {10: Unproven.AGENTS, 11: Unproven.AGENTS}
    for each in table.values():
        kernel[each.pid] = each, {MARK: mark("web", BASE)}, ""
        found = Ownership(BASE).tie(each, "web", "web", ProcessRecord(), NEW._replace(pid=each.pid))
        assert found[0] is Tie.NONE


def test_known_process_proves_its_session(kernel: Kernel) -> None:
    """Its leader has exited. Other processes in it belong to the service while the known process is in it."""
    traces = ProcessRecord(known=(11, 150), sessions=[Session(10, 100)])
    kernel[12] = stat(12, session=10, start=900), {}, ""
    assert not own(kernel[12][0], traces, NEW)
    kernel[11] = stat(11, session=10, start=150), {}, ""

    assert own(kernel[12][0], traces, NEW)


def test_number_of_recorded_sessions_of_a_service_is_bounded() -> None:
    """Its processes may begin any number."""
    traces = ProcessRecord()
    for pid in range(100, 100 + 2 * MAX_SESSIONS):
        traces.widen(stat(pid, session=pid))
        traces.widen(stat(pid, session=pid))
    assert sorted(traces.numbers()) == list(range(100, 100 + MAX_SESSIONS))
    traces.begin((99, 1), None)

    assert len(traces.sessions) == MAX_SESSIONS
    assert 99 in traces.numbers()


def test_exiting_orphan_may_belong_to_any_service(leaving: set[int]) -> None:
    """Its mark vanishes before it exits.

    One that stays, has a mark, or is not an orphan of this agent is not in doubt.
    """
    processes = [
        stat(10),
        stat(11, parent=US),
        stat(12, parent=US),
        stat(13, parent=US),
        stat(14, parent=US, state="Z"),
        stat(15, parent=1),
    ]
    table = {each.pid: each for each in processes}
    traces = ProcessRecord(known=(10, 1000))
    ownership = Ownership(BASE)
    ownership.records = lambda: [("web", traces)]
    leaving.update({10, 11, 13, 14, 15})

    found = ownership.members(Look(table, proc.children(table), {"other@/b": {13}}, frozenset(), {}), "web", traces)

    assert found.identities == [(10, 1000)]
    assert found.leaving == [(11, 1000)]


def test_strays_are_unattributed_orphans_since_a_start(
    kernel: Kernel, leaving: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They exclude those of operators and of root, and those with a mark."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(proc, "user", lambda pid: 0 if pid == 14 else USER)
    processes = [
        stat(10, parent=US, start=1000),
        stat(11, parent=US, start=999),
        stat(12, parent=US, start=1001),
        stat(13, parent=US, start=1001, state="Z"),
        stat(14, parent=US, start=1001),
        stat(15, parent=1, start=1001),
        stat(16, parent=US, start=1001),
    ]
    table = {each.pid: each for each in processes}
    ownership = Ownership(BASE)
    ownership.records = lambda: [("web", ProcessRecord())]
    seen = Look(table, proc.children(table), {mark("web", BASE): {12}}, frozenset(), {})
    leaving.add(16)

    found = ownership.strays(seen, 1000)

    assert (found.identities, found.leaving) == ([(10, 1000)], {(16, 1001)})


def test_unread_process_of_a_known_owner_leaves_no_doubt(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one without a known ancestor, or without a record in the pass, may leave a child of any service."""
    monkeypatch.setattr(process, "is_spawned", lambda identity: identity == (14, 1000))
    kin = {10: 1, 11: 10, 12: 1, 13: 12, 14: US, 15: 14, 16: 1, 17: 16, 18: US}
    table = {pid: stat(pid, parent=parent) for pid, parent in kin.items()}
    ownership = Ownership(BASE)
    other = ProcessRecord(known=(12, 1000))
    ownership.records = lambda: [("web", ProcessRecord(known=(10, 1000))), ("other", other)]
    seen = Look(table, proc.children(table), {}, frozenset({11, 13, 15, 17, 18, 99}), {})

    assert ownership.members(seen, "web", ProcessRecord(known=(10, 1000))).unread == frozenset({11, 17, 18, 99})
    assert ownership.strays(seen, 0).unread == frozenset({17, 18, 99})
    unknown = Look(table, proc.children(table), {}, None, {})
    assert ownership.members(unknown, "web", other).unread is None
    assert ownership.strays(unknown, 0).unread is None


def test_exited_orphan_is_attributed_by_its_session_during_a_search(kernel: Kernel) -> None:
    """A moment ago the session was the service's. Otherwise its own evidence counts."""
    ownership = Ownership(BASE)
    ownership.records = lambda: [("web", ProcessRecord(known=(11, 1000), sessions=[Session(10, 100)]))]
    ended, known, other = stat(12, parent=US, session=10), stat(11, parent=US, session=77), stat(13, parent=US)

    assert [ownership.attribute(each, {"web"}) for each in (ended, known, other)] == ["web", "web", Unproven.ORPHAN]
    assert ownership.attribute(ended, {"other"}) is Unproven.ORPHAN
    assert ownership.attribute(stat(14, parent=1)) is Unproven.FOREIGN
