"""Tests the record of a service's processes, and the pidfiles from which they are read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent_shim.host import proc
from agent_shim.supervisor.ownership.process_record import Pidfile, ProcessRecord, read

PROCESS, PROGRAM = (7, 70), (8, 80)


def test_process_record_forgets_an_exited_process() -> None:
    record = ProcessRecord(known=PROCESS, program=PROGRAM)

    record.ended(PROCESS)
    assert (record.known, record.program) == (None, PROGRAM)
    record.ended(PROGRAM)
    assert record.program is None


def test_process_record_drops_exited_processes_when_new_ones_are_added() -> None:
    itself = proc.stat(os.getpid())
    assert itself is not None
    record = ProcessRecord(others=[PROCESS])

    record.take_over([itself.identity, (itself.pid, 1)])

    assert record.others == [itself.identity]


@pytest.mark.attack("a job puts a link into a path in which root creates, opens or chowns files")
def test_pidfile_must_be_a_regular_file(tmp_path: Path) -> None:
    """A FIFO is rejected without blocking the agent, even if it contains a number.

    A directory and a missing file are rejected as well.
    """
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


def test_pidfile_is_new_if_it_differs_from_the_one_before_the_start() -> None:
    record, old = ProcessRecord(), Pidfile(7, 1.0, 1)
    assert not record.is_fresh(old)
    record.begin(PROGRAM, old)

    assert not record.is_fresh(old)
    assert record.is_fresh(old._replace(modified=2.0))
    assert (record.program, record.begun, record.before) == (PROGRAM, 80, old)


def test_pidfile_is_recorded_with_its_time_and_owner(tmp_path: Path) -> None:
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
