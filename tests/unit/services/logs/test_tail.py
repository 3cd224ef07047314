"""Tests streaming of job logs that are rotated, truncated, flooded or replaced by symlinks."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_shim.services.logs import log_file, tail
from agent_shim.services.logs.tail import Follower, LogLine


class Clock:
    """A clock that advances only when a test changes it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def follower(tmp_path: Path, clock: Clock) -> Iterator[Follower]:
    made = Follower(tmp_path, clock=clock)
    yield made
    made.close()


def append(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.write(text)


def new_output(follower: Follower, clock: Clock) -> list[str]:
    """Advance the clock until the follower is due to search for new files, and return the lines from its next poll."""
    clock.now += tail.SEARCH_PERIOD_S
    return [line.plain() for line in follower.poll()]


def test_tail_prefixes_lines_with_their_job_and_file(tmp_path: Path, follower: Follower, clock: Clock) -> None:
    append(tmp_path / "web/web.stdout.log", "one\ntwo\n")
    append(tmp_path / "web/web.stderr.log", "ouch\n")

    assert sorted(new_output(follower, clock)) == [
        "web/web.stderr.log | ouch",
        "web/web.stdout.log | one",
        "web/web.stdout.log | two",
    ]
    assert new_output(follower, clock) == []


def test_tail_shows_a_line_once_it_is_complete(tmp_path: Path, follower: Follower, clock: Clock) -> None:
    append(tmp_path / "web/a.log", "be")
    assert new_output(follower, clock) == []
    append(tmp_path / "web/a.log", "gin\nnext")
    assert new_output(follower, clock) == ["web/a.log | begin"]


def test_tail_finishes_a_renamed_log_and_reads_the_new_log(tmp_path: Path, follower: Follower, clock: Clock) -> None:
    log = tmp_path / "web/a.log"
    append(log, "1\n")
    assert new_output(follower, clock) == ["web/a.log | 1"]
    append(log, "2\n")
    log.rename(tmp_path / "web/a.log.1")
    append(log, "3\n")

    assert new_output(follower, clock) == ["web/a.log | 2", "web/a.log | 3"]
    append(tmp_path / "web/a.log.1", "lost\n")
    assert new_output(follower, clock) == []


def test_tail_reads_a_truncated_log_from_its_start(tmp_path: Path, follower: Follower, clock: Clock) -> None:
    log = tmp_path / "web/a.log"
    append(log, "a long first line\n")
    assert len(new_output(follower, clock)) == 1
    os.truncate(log, 0)
    append(log, "after\n")

    assert new_output(follower, clock) == ["web/a.log | after"]


def test_tail_closes_a_removed_log_and_reads_it_when_it_returns(
    tmp_path: Path, follower: Follower, clock: Clock
) -> None:
    log = tmp_path / "web/a.log"
    append(log, "1\n")
    new_output(follower, clock)
    log.unlink()
    assert new_output(follower, clock) == []
    assert not [link for link in Path("/proc/self/fd").iterdir() if str(log) in _target(link)]
    append(log, "2\n")
    assert new_output(follower, clock) == ["web/a.log | 2"]


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""


@pytest.mark.attack("a job exposes other users' files through symlinks or hard links in its log directory")
def test_tail_follows_no_symlink(tmp_path: Path, follower: Follower, clock: Clock) -> None:
    secret = tmp_path.parent / f"{tmp_path.name}-secret.log"
    secret.write_text("password\n")
    (tmp_path / "web").mkdir()
    (tmp_path / "web/a.log").symlink_to(secret)
    (tmp_path / "evil").symlink_to(tmp_path.parent)

    assert new_output(follower, clock) == []


@pytest.mark.attack("a job tricks root into opening a FIFO or a device")
def test_tail_does_not_block_on_a_fifo(tmp_path: Path, follower: Follower, clock: Clock) -> None:
    (tmp_path / "web").mkdir()
    os.mkfifo(tmp_path / "web/a.log")

    assert new_output(follower, clock) == []


def test_tail_drops_lines_above_the_rate_limit_and_reports_their_size(tmp_path: Path, clock: Clock) -> None:
    follower = Follower(tmp_path, rate=1000, clock=clock)
    append(tmp_path / "web/a.log", "x" * 99 + "\n")
    assert [line.endswith("x" * 99) for line in new_output(follower, clock)] == [True]
    append(tmp_path / "web/a.log", ("y" * 99 + "\n") * 1000)
    clock.now += 1

    lines = [line.text for line in follower.poll()]
    follower.close()

    assert lines[0] == "(99000 bytes left out here: over the limit per second)"
    assert lines[1:] == ["y" * 99] * 10


def test_tail_splits_an_endless_line(tmp_path: Path, follower: Follower, clock: Clock) -> None:
    append(tmp_path / "web/a.log", "z" * (log_file.MAX_LINE_BYTES * 2 + 5))
    found = [line.text for line in _new_lines(follower, clock)]

    assert [len(text) for text in found] == [log_file.MAX_LINE_BYTES] * 2


def _new_lines(follower: Follower, clock: Clock) -> list[LogLine]:
    clock.now += tail.SEARCH_PERIOD_S
    return list(follower.poll())


def test_tail_shows_the_last_lines_and_then_new_lines(tmp_path: Path, clock: Clock) -> None:
    append(tmp_path / "web/a.log", "".join(f"{number}\n" for number in range(100)))
    append(tmp_path / "other/b.log", "not asked for\n")
    follower = Follower(tmp_path, "web", clock=clock)

    assert [line.text for line in follower.last(3)] == ["97", "98", "99"]
    append(tmp_path / "web/a.log", "100\n")
    assert new_output(follower, clock) == ["web/a.log | 100"]
    follower.close()


def test_tail_replaces_invalid_utf_8_and_keeps_json_valid() -> None:
    line = LogLine("web", "a.log", b'\xff\x00"')

    assert json.loads(line.as_json()) == {"logger": "job", "job": "web", "file": "a.log", "message": '\ufffd\0"'}


# --- jobs that change the tree while it is read -----------------------------------------------------------------------


@pytest.mark.attack("a job gives its logs names that are not UTF-8")
def test_tail_escapes_a_file_name_in_invalid_utf_8(tmp_path: Path, follower: Follower, clock: Clock) -> None:
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / os.fsdecode(b"\xff\n\x1b[2J.log")).write_text("mine\n")
    append(tmp_path / "good/x.log", "theirs\n")

    found = new_output(follower, clock)

    assert found == ["evil/\\udcff\\n\\x1b[2J.log | mine", "good/x.log | theirs"]
    for line in found:
        line.encode()


def test_tail_limits_files_per_job_without_excluding_other_jobs(
    tmp_path: Path, follower: Follower, clock: Clock
) -> None:
    (tmp_path / "evil").mkdir()
    for number in range(tail.MAX_FILES + 100):
        path = tmp_path / f"evil/{number}.log"
        path.write_text("noise\n")
        os.utime(path, (number, number))
    append(tmp_path / "good/x.log", "theirs\n")

    found = new_output(follower, clock)

    share = tail.MAX_FILES // 2
    assert found[0] == f"evil/* | (only {share} files of this job are followed: it has more)"
    message = tail.LogLine("evil", "*", b"(only a few files are followed)")
    assert abs(follower.changed_at(message) - time.time()) < 60  # otherwise, `logs --since` would omit the message
    assert "good/x.log | theirs" in found
    assert len(found) == share + 2
    assert f"evil/{tail.MAX_FILES + 99}.log | noise" in found
    assert new_output(follower, clock) == []
    append(tmp_path / "late/x.log", "late\n")
    assert new_output(follower, clock) == ["late/x.log | late"]


def test_tail_skips_holes_in_a_sparse_file(tmp_path: Path, clock: Clock) -> None:
    """A job can easily create a sparse file that would take hours to read."""
    follower = Follower(tmp_path, clock=clock)
    append(tmp_path / "evil/x.log", "first\n")
    assert new_output(follower, clock) == ["evil/x.log | first"]
    with (tmp_path / "evil/x.log").open("r+") as file:
        file.truncate(1 << 42)
        file.seek(0, os.SEEK_END)
        file.write("\nlast\n")

    assert new_output(follower, clock)[-1] == "evil/x.log | last"
    assert [line.text for line in Follower(tmp_path, clock=clock).last(1)] == ["last"]
    follower.close()


def test_tail_finds_the_last_lines_across_many_chunks(tmp_path: Path, clock: Clock) -> None:
    lines = [f"{number} {'x' * 100}" for number in range(5000)]
    append(tmp_path / "web/x.log", "\n".join(lines) + "\n")

    assert [line.text for line in Follower(tmp_path, clock=clock).last(3000)] == lines[-3000:]
    assert [line.text for line in Follower(tmp_path, clock=clock).last(9000)] == lines
    assert list(Follower(tmp_path, clock=clock).last(0)) == []
