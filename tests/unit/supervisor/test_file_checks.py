"""Results of rules on files and file systems."""

from __future__ import annotations

import errno
import grp
import hashlib
import os
import pwd
from pathlib import Path

import pytest

from agent_shim.supervisor import file_checks
from agent_shim.supervisor.file_checks import MAX_NEW_BYTES, Memory, inspect
from agent_shim.supervisor.monit.ast import (
    ALERT,
    IGNORE,
    Changed,
    Checksum,
    Limit,
    Match,
    Owner,
    Permission,
    Rule,
    Test,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A small file."""
    path = tmp_path / "file"
    path.write_text("one\n")
    path.chmod(0o640)
    return path


def fails(path: Path, test: Test, memory: Memory | None = None) -> bool:
    (found,) = inspect(path, [Rule(test, ALERT)], memory or Memory())
    assert found is not None
    return found.fails


def test_size_and_age(path: Path) -> None:
    """Compared with bytes, and with seconds since it was written."""
    os.utime(path, (0, path.stat().st_mtime - 100))

    assert fails(path, Limit("size", ">", 3))
    assert not fails(path, Limit("size", ">", 4))
    assert fails(path, Limit("timestamp", ">", 60))
    assert not fails(path, Limit("timestamp", ">", 1000))


def test_mode_and_owner(path: Path) -> None:
    """By name or number."""
    assert not fails(path, Permission(0o640))
    assert fails(path, Permission(0o644))
    assert not fails(path, Owner("uid", str(os.geteuid())))
    assert fails(path, Owner("gid", str(path.stat().st_gid + 1)))
    with pytest.raises(ValueError, match="there is no user nobody-here"):
        fails(path, Owner("uid", "nobody-here"))
    with pytest.raises(ValueError, match="there is no group nobody-here"):
        fails(path, Owner("gid", "nobody-here"))


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file away")
def test_user_and_group_are_two_things(path: Path) -> None:
    """Their numbers differ here, and a name can be that of a user alone or of a group alone."""
    no_user = next(each for each in grp.getgrall() if each.gr_name not in {one.pw_name for one in pwd.getpwall()})
    os.chown(path, 4001, no_user.gr_gid)

    assert not fails(path, Owner("uid", "4001"))
    assert not fails(path, Owner("gid", no_user.gr_name))
    assert fails(path, Owner("gid", "4001"))


def test_checksum_of_the_file_or_of_its_beginning(path: Path) -> None:
    """Return the rule's message, or the value of the first check."""
    memory = Memory()

    assert not fails(path, Checksum("sha1", hashlib.sha1(b"one\n").hexdigest()))
    assert fails(path, Checksum("md5", hashlib.md5(b"two\n").hexdigest()))
    assert not fails(path, Checksum(), memory)
    path.write_text("two\n")
    assert fails(path, Checksum(), memory)


@pytest.mark.parametrize("test", [Changed("size"), Changed("timestamp"), Changed("checksum", "sha1")])
def test_change_is_seen_once(path: Path, test: Changed) -> None:
    """Against the look before."""
    memory = Memory()

    assert not fails(path, test, memory)
    path.write_text("another\n")
    os.utime(path, (0, 12345))
    assert fails(path, test, memory)
    assert not fails(path, test, memory)


def test_new_lines_are_matched_once(path: Path) -> None:
    """Neither earlier text nor half a line is searched; a replaced file is searched from its start."""
    memory, test = Memory(), Match("^bad")
    path.write_text("bad old\n")

    assert not fails(path, test, memory)
    with path.open("a") as stream:
        stream.write("good\nbad ne")
    assert not fails(path, test, memory)
    with path.open("a") as stream:
        stream.write("w\n")
    assert fails(path, test, memory)
    assert not fails(path, test, memory)
    path.unlink()
    path.write_text("bad other\n")
    assert fails(path, test, memory)


def test_ignored_lines_are_seen_by_no_rule(path: Path, tmp_path: Path) -> None:
    """Patterns from a file, and the other way round."""
    patterns = tmp_path / "patterns"
    patterns.write_text("bad\nworse\n")
    memory = Memory()
    rules = [
        Rule(Match("known", ""), IGNORE),
        Rule(Match(path=str(patterns)), ALERT),
        Rule(Match("o", negated=True), ALERT),
    ]
    inspect(path, rules, memory)
    path.write_text(path.read_text() + "worse but known\n")
    assert [each and each.fails for each in inspect(path, rules, memory)] == [None, False, False]
    path.write_text(path.read_text() + "worse\n")
    assert [each and each.fails for each in inspect(path, rules, memory)] == [None, True, False]
    path.write_text(path.read_text() + "bad\n")
    assert [each and each.fails for each in inspect(path, rules, memory)] == [None, True, True]


def test_no_more_than_the_end_of_a_flood_is_read(path: Path) -> None:
    """A growth of gigabytes between two checks costs a megabyte."""
    memory = Memory()
    assert not fails(path, Match("bad"), memory)
    with path.open("ab") as stream:
        stream.write(b"bad\n" + b"x\n" * MAX_NEW_BYTES)

    assert not fails(path, Match("bad"), memory)
    assert memory.read_to == path.stat().st_size


def test_a_line_without_an_end_is_matched_when_it_is_too_long_to_wait_for(path: Path) -> None:
    """A shorter one is matched once it is whole."""
    memory, test = Memory(), Match("bad")
    assert not fails(path, test, memory)
    with path.open("a") as stream:
        stream.write("bad")
    assert not fails(path, test, memory)
    with path.open("a") as stream:
        stream.write(" line\n")
    assert fails(path, test, memory)
    with path.open("a") as stream:
        stream.write("bad" + "x" * MAX_NEW_BYTES)
    assert not fails(path, test, memory)  # its end alone is read
    with path.open("a") as stream:
        stream.write("bad" + "y" * (MAX_NEW_BYTES - 3))
    assert fails(path, test, memory)
    assert not fails(path, test, memory)


def test_filesystem_in_percent_and_in_bytes(path: Path) -> None:
    """The value is that of the path's file system."""
    usage = os.statvfs(path)
    used = (usage.f_blocks - usage.f_bfree) * usage.f_frsize

    assert fails(path, Limit("space", ">", used / 2))
    assert not fails(path, Limit("space", ">", used * 2))
    assert not fails(path, Limit("space", ">", 100, percent=True))
    assert fails(path, Limit("space", ">", 100))
    assert fails(path, Limit("space", ">", 0, percent=True))
    assert not fails(path, Limit("inode", ">", 100, percent=True))
    assert not fails(path, Limit("inode", ">", usage.f_files - usage.f_ffree + 1_000_000))
    assert not fails(path, Changed("fsflag"))


# --- what a job may leave in the place of a file ---------------------------------------------------------------------


@pytest.mark.parametrize("test", [Match("x"), Checksum("md5", ""), Changed("checksum", "md5")])
def test_a_pipe_is_not_waited_for(tmp_path: Path, test: Test) -> None:
    """Every rule gives this answer."""
    os.mkfifo(tmp_path / "file")
    with pytest.raises(OSError, match="not a regular file"):
        fails(tmp_path / "file", test)


def test_a_checksum_that_takes_too_long_is_given_up(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hole of terabytes costs its writer nothing."""
    monkeypatch.setattr(file_checks, "DIGEST_TIMEOUT_S", 0.0)
    with path.open("r+b") as file:
        file.truncate(1 << 42)
    with pytest.raises(OSError, match="checksum takes more") as caught:
        fails(path, Checksum("md5", ""))
    assert caught.value.errno == errno.EFBIG


def test_what_was_matched_is_one_line_without_orders_to_a_terminal(path: Path) -> None:
    memory = Memory()
    inspect(path, [Rule(Match("bad"), ALERT)], memory)
    with path.open("ab") as stream:
        stream.write(b"bad\r\x1b[2J\xff\n")
    (found,) = inspect(path, [Rule(Match("bad"), ALERT)], memory)

    assert found is not None
    assert found.text.isprintable()
