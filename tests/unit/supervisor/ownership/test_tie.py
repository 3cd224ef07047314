"""Tests how a process relates to the service whose pidfile or pattern matches it."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent_shim.host import clock, proc, process
from agent_shim.supervisor import posix_regex
from agent_shim.supervisor.ownership.keepers import rule_label, script_label
from agent_shim.supervisor.ownership.process_record import Pidfile, ProcessRecord
from agent_shim.supervisor.ownership.tie import Tie, match, tie
from agent_shim.supervisor.plan import ProcessSpec

USER = 4711
SPEC = ProcessSpec("web", "job", pidfile="/run/bpm/job/web.pid", pattern=posix_regex.compiled("web -d"))
BEGAN = 1000
ONE = proc.Stat(50, "S", 7, 50, 50, 0, BEGAN, 0)
OLDER = Pidfile(50, 9.0, 7, USER)
"""A pidfile that was written before the process started."""
NEWER = Pidfile(50, 11.0, 7, USER)


@pytest.fixture(autouse=True)
def _fake_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "wall_time_of", lambda ticks: ticks / 100)
    monkeypatch.setattr(proc, "user", lambda _: USER)
    monkeypatch.setattr(proc, "executable", lambda _: "/usr/bin/java")
    monkeypatch.setattr(proc, "command_line", lambda _: "java -jar /var/vcap/packages/web/web.jar")


def keepers(owner: str = "", keeper: int = 0) -> Any:
    """Return stand-ins for the keepers: they attribute every process to ``owner``, and one of them has the pid
    ``keeper``.
    """
    return SimpleNamespace(owner=lambda _: owner, pids={keeper}, base=Path("/var/vcap"))


@pytest.mark.attack("a job writes the pid of a root process or of another job's process into its pidfile")
@pytest.mark.parametrize(
    ("owner", "expected"),
    [
        ("web", Tie.OWNED),
        ("bpm/job/web", Tie.OWNED),
        (script_label("job"), Tie.SHARED),
        (rule_label("job"), Tie.SHARED),
        (rule_label("any"), Tie.SHARED),
        ("", Tie.NAMED),
        (script_label("any"), Tie.NONE),
        ("other", Tie.NONE),
        ("bpm/job/other", Tie.NONE),
    ],
)
def test_process_belongs_to_the_job_of_its_keeper(owner: str, expected: Tie) -> None:
    found, why = tie(keepers(owner), ONE, SPEC, ProcessRecord(), NEWER)

    assert found is expected
    assert why == (f"it belongs to {owner}" if expected is Tie.NONE else "")


@pytest.mark.parametrize("owner", ["", rule_label("job")])
@pytest.mark.parametrize(
    ("pidfile", "is_believed"),
    [
        (NEWER, True),
        (OLDER, False),
        (NEWER._replace(owner=0), True),
        (NEWER._replace(owner=os.geteuid()), True),
        (NEWER._replace(owner=USER + 1), False),
    ],
)
def test_pidfile_must_be_newer_than_the_process_and_owned_by_a_user_who_may_signal_it(
    owner: str, pidfile: Pidfile, is_believed: bool
) -> None:
    """If the service's own keeper is an ancestor of the process, the age and owner of the pidfile do not matter."""
    found, why = tie(keepers(owner), ONE, SPEC, ProcessRecord(), pidfile)

    assert (found is not Tie.NONE) is is_believed
    assert bool(why) is not is_believed
    assert tie(keepers("web"), ONE, SPEC, ProcessRecord(), pidfile)[0] is Tie.OWNED


@pytest.mark.attack("a job makes a dead service appear to be running by using the pid of an operator's process")
@pytest.mark.parametrize(
    ("line", "executable", "owner", "is_named"),
    [
        ("/var/vcap/packages/web/bin/web -d", "/bin/sh", 0, True),
        ("/var/vcap/packages/web/bin/web -d", "/bin/sh", USER, True),
        ("/usr/sbin/sshd -D", "/usr/sbin/sshd", 0, False),
        ("/var/vcapx/bin/web", "/var/vcapx/bin/web", 0, False),
        ("tail -f /var/vcap/sys/log/web/web.log", "/usr/bin/tail", USER + 1, False),
        ("agent-shim logs", "/var/vcap/bosh/bin/python3", USER + 1, False),
        ("web -d", "/var/vcap/data/packages/web/1/bin/web", USER + 1, True),
    ],
)
def test_process_without_a_keeper_is_accepted_only_if_it_runs_a_job_program(
    monkeypatch: pytest.MonkeyPatch, line: str, executable: str, owner: int, is_named: bool
) -> None:
    """A process without a keeper was started by hand or by monit. The agent watches such a process but never signals
    it.
    """
    monkeypatch.setattr(proc, "executable", lambda _: executable)
    monkeypatch.setattr(proc, "command_line", lambda _: line)

    found, why = tie(keepers(), ONE, SPEC, ProcessRecord(), NEWER._replace(owner=owner))

    assert found is (Tie.NAMED if is_named else Tie.NONE)
    assert bool(why) is not is_named


def test_stale_pidfile_does_not_identify_a_new_process_with_the_same_pid() -> None:
    """A process's pid may be reused after the process exits, so its old pidfile is ignored. A pidfile written later
    is accepted.
    """
    record = ProcessRecord(named_by=NEWER)

    assert tie(keepers("web"), ONE, SPEC, record, NEWER) == (Tie.NONE, "its pidfile is older than the process")
    assert tie(keepers("web"), ONE, SPEC, record, NEWER._replace(inode=8))[0] is Tie.OWNED


def test_start_program_counts_as_the_process_only_if_the_pidfile_was_written_after_it_started() -> None:
    record = ProcessRecord()
    record.begin(ONE.identity, OLDER)

    assert tie(keepers("web"), ONE, SPEC, record, OLDER)[0] is Tie.NONE
    assert tie(keepers("web"), ONE, SPEC, record, NEWER)[0] is Tie.OWNED


def test_recorded_process_without_a_keeper_still_belongs_to_its_service() -> None:
    """A recorded process's keeper may have been killed, or the process may never have had one."""
    assert tie(keepers(), ONE, SPEC, ProcessRecord(known=ONE.identity), OLDER)[0] is Tie.OWNED
    assert tie(keepers(), ONE, SPEC, ProcessRecord(known=ONE.identity, is_only_named=True), OLDER)[0] is Tie.NAMED
    assert tie(keepers(), ONE, SPEC, ProcessRecord(others=[ONE.identity]), OLDER)[0] is Tie.OWNED


def test_pidfile_may_name_pid_1_after_a_start() -> None:
    """A job without processes, such as one that only sets firewall rules, may write 1 into its pidfile."""
    first = proc.Stat(1, "S", 0, 1, 1, 0, 0, 0)
    record = ProcessRecord()
    record.begin((40, 900), OLDER)

    assert tie(keepers(), first, SPEC, record, NEWER)[0] is Tie.NAMED
    assert tie(keepers(), first, SPEC, ProcessRecord(), NEWER) == (Tie.NONE, "it is PID 1")


@pytest.mark.attack("a job writes the pid of a root process or of another job's process into its pidfile")
@pytest.mark.parametrize("which", ["keeper", "child"])
def test_pidfile_that_names_an_agent_process_is_rejected(monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    """The agent's own processes are its keepers, sshd and workers."""
    monkeypatch.setattr(process, "is_spawned", lambda _: which == "child")

    found = tie(keepers("web", keeper=50 if which == "keeper" else 0), ONE, SPEC, ProcessRecord(), NEWER)

    assert found == (Tie.NONE, "it belongs to the agent")


@pytest.mark.parametrize(
    ("owners", "record", "expected"),
    [
        ({10: "other", 11: ""}, ProcessRecord(), (11, Tie.NAMED)),
        ({10: "web", 11: ""}, ProcessRecord(), (10, Tie.OWNED)),
        ({10: "", 11: "web"}, ProcessRecord(known=(11, 110)), (11, Tie.OWNED)),
        ({10: "", 11: script_label("job")}, ProcessRecord(program=(10, 100)), (11, Tie.SHARED)),
        ({10: script_label("any")}, ProcessRecord(), None),
        ({10: ""}, ProcessRecord(known=(10, 100), is_only_named=True), (10, Tie.NAMED)),
        ({10: ""}, ProcessRecord(known=(10, 100)), (10, Tie.OWNED)),
        ({10: "web", 13: "web"}, ProcessRecord(known=(13, 130)), (10, Tie.OWNED)),  # 13 is a keeper
        ({}, ProcessRecord(), None),
    ],
)
def test_pattern_selects_the_recorded_process_or_else_the_oldest(
    monkeypatch: pytest.MonkeyPatch,
    owners: dict[int, str],
    record: ProcessRecord,
    expected: tuple[int, Tie] | None,
) -> None:
    """The start program, which may be a script that is still running, is chosen only if no other process matches.

    Other services' processes are ignored.
    """
    processes = {pid: proc.Stat(pid, "S", 7, pid, pid, 0, pid * 10, 0) for pid in (*owners, 1, os.getpid(), 12)}
    monkeypatch.setattr(proc, "table", lambda: processes)
    lines = dict.fromkeys(processes, "web -d") | {12: "sleep"}
    monkeypatch.setattr(proc, "command_lines", lambda pids: {pid: lines[pid] for pid in pids})
    kept: Any = SimpleNamespace(owner=lambda identity: owners[identity[0]], pids={13})
    found = match(kept, SPEC, record)

    assert (found and (found[0].pid, found[1])) == expected
