"""Contents of the record of a service's processes."""

from __future__ import annotations

from pathlib import Path

from agent_shim.supervisor.process_record import Pidfile, ProcessRecord, read

PROCESS, PROGRAM = (7, 70), (8, 80)


def test_an_exited_process_is_no_longer_known_and_its_session_is() -> None:
    record = ProcessRecord(known=PROCESS, program=PROGRAM)

    record.ended(PROCESS, 7, 75)
    assert (record.known, record.program) == (None, PROGRAM)
    assert [(session.pid, session.start, session.seen, session.is_led) for session in record.sessions] == [
        (7, 70, 75, False)
    ]
    record.ended(PROGRAM, 7, 90)
    assert record.program is None
    assert [(session.pid, session.seen) for session in record.sessions] == [(7, 90)]


def test_a_process_that_is_only_watched_leaves_no_session() -> None:
    record = ProcessRecord(known=PROCESS, is_guest=True)

    record.ended(PROCESS, 7, 75)

    assert (record.known, record.sessions) == (None, [])


def test_a_pidfile_is_fresh_once_it_differs_from_the_one_before_the_start() -> None:
    record, old = ProcessRecord(), Pidfile(7, 1.0, 1)
    assert not record.is_fresh(old)
    record.begin(PROGRAM, old)

    assert not record.is_fresh(old)
    assert record.is_fresh(old._replace(modified=2.0))
    assert (record.program, record.begun, record.numbers()) == (PROGRAM, 80, {8})


def test_a_pidfile_begins_with_a_number_above_zero(tmp_path: Path) -> None:
    for text, pid in ((" 12\n", 12), ("12 web", 12), ("0", None), ("-1", None), ("web", None), ("1" * 11, None)):
        path = tmp_path / "pid"
        path.write_text(text)
        found = read(path)
        assert (found.pid if found else None) == pid
    assert read(tmp_path / "none") is None
    assert read(None) is None
