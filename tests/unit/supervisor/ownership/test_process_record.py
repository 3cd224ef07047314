"""Contents of the record of a service's processes."""

from __future__ import annotations

import os
from pathlib import Path

from agent_shim.host import proc
from agent_shim.supervisor.ownership.process_record import Pidfile, ProcessRecord, read

PROCESS, PROGRAM = (7, 70), (8, 80)


def test_record_forgets_an_exited_process_but_keeps_its_session() -> None:
    record = ProcessRecord(known=PROCESS, program=PROGRAM)

    record.ended(PROCESS, 7, 75)
    assert (record.known, record.program) == (None, PROGRAM)
    assert [(session.pid, session.start, session.seen, session.is_led) for session in record.sessions] == [
        (7, 70, 75, False)
    ]
    record.ended(PROGRAM, 7, 90)
    assert record.program is None
    assert [(session.pid, session.seen) for session in record.sessions] == [(7, 90)]


def test_record_keeps_no_session_of_a_watched_process() -> None:
    record = ProcessRecord(known=PROCESS, is_only_named=True)

    record.ended(PROCESS, 7, 75)

    assert (record.known, record.sessions) == (None, [])


def test_pidfile_is_new_if_it_differs_from_the_one_before_the_start() -> None:
    record, old = ProcessRecord(), Pidfile(7, 1.0, 1)
    assert not record.is_fresh(old)
    record.begin(PROGRAM, old)

    assert not record.is_fresh(old)
    assert record.is_fresh(old._replace(modified=2.0))
    assert (record.program, record.begun, record.numbers()) == (PROGRAM, 80, {8})


def test_session_is_led_only_by_the_process_with_its_number() -> None:
    """The kernel's own processes have the session 0."""
    record = ProcessRecord()
    for pid, session in ((7, 7), (9, 8), (10, 0), (1, 1)):
        record.widen(proc.Stat(pid, "S", 1, pid, session, 0, 100, 0))

    assert [(each.pid, each.start, each.is_led) for each in record.sessions] == [
        (7, 100, True),
        (8, 100, False),
        (1, 100, True),
    ]


def test_pidfile_record_has_the_time_and_owner_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    path.write_text("12")
    os.utime(path, ns=(0, 1_500_000_000_000_000_000))
    status = path.stat()

    assert read(path) == Pidfile(12, 1_500_000_000.0, status.st_ino, status.st_uid)


def test_pidfile_must_begin_with_a_positive_number(tmp_path: Path) -> None:
    for text, pid in ((" 12\n", 12), ("12 web", 12), ("0", None), ("-1", None), ("web", None), ("1" * 11, None)):
        path = tmp_path / "pid"
        path.write_text(text)
        found = read(path)
        assert (found.pid if found else None) == pid
    assert read(tmp_path / "none") is None
    assert read(None) is None
