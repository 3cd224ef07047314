"""Tests path checks, cycle by cycle. ``integration/test_rule_engine_releases.py`` tests the resulting actions."""

from __future__ import annotations

import hashlib
import os
import socket
from pathlib import Path

import pytest

from agent_shim.host import guarded, trusted_path
from agent_shim.supervisor import path_checks
from agent_shim.supervisor.monit import parser
from agent_shim.supervisor.monit.ast import JobFile
from agent_shim.supervisor.path_checks import PathWatch
from agent_shim.supervisor.plan import plan


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "file"
    found.write_text("one\n")
    found.chmod(0o640)
    return found


def watch_of(path: Path, *tests: str, kind: str = "file") -> PathWatch:
    """Create a watch for a path check with ``tests``, some of which may be ``ignore`` statements."""
    lines = [test if test.startswith("ignore") else f"if {test} then alert" for test in tests]
    (spec,) = plan([JobFile("job", "", "\n".join([f"check {kind} it with path {path}", *lines, ""]))])
    assert not spec.error, spec.error
    return PathWatch(spec, path)


def fails(watch: PathWatch) -> list[int]:
    """Return the indexes of the rules that fail."""
    return [number for number, finding in watch.look() if finding.fails]


def failure_texts(watch: PathWatch) -> list[str]:
    return [finding.text for _, finding in watch.look() if finding.fails]


@pytest.mark.parametrize(
    ("test", "is_bad"),
    [
        ("failed permission 640", False),
        ("failed permission 644", True),
        ("failed permission 0640", False),
        (f"failed uid {os.geteuid()}", False),
        ("failed uid 12345", True),
        (f"failed gid {os.getegid()}", False),
        ("failed gid 12345", True),
        ("size > 3", True),
        ("size > 4", False),
        ("size = 4 b", True),
        ("size != 4 b", False),
        ("timestamp > 1 hour", False),
        ("timestamp < 1 hour", True),
        (f"failed checksum expect {hashlib.md5(b'one').hexdigest()}", True),
        (f"failed checksum expect {hashlib.md5(b'one' + bytes([10])).hexdigest()}", False),
        (f"failed checksum expect {hashlib.sha1(b'one' + bytes([10])).hexdigest()}", False),
    ],
)
def test_path_check_fails_only_if_a_value_violates_the_rule(path: Path, test: str, is_bad: bool) -> None:
    assert fails(watch_of(path, test)) == [0] * is_bad


def test_file_age_counts_from_the_last_change(path: Path) -> None:
    """A change to the content, owner, mode or name resets the age, even if the modification time is old."""
    os.utime(path, (0, 0))

    assert fails(watch_of(path, "timestamp > 1 hour")) == []


@pytest.mark.parametrize("test", ["changed timestamp", "changed size", "changed checksum", "changed sha1 checksum"])
def test_change_check_compares_consecutive_cycles(path: Path, test: str) -> None:
    watch = watch_of(path, test)
    assert fails(watch) == fails(watch) == []

    path.write_text("another\n")

    assert fails(watch) == [0]
    assert fails(watch) == []


def test_checksum_check_without_an_expected_value_compares_with_the_first_cycle(path: Path) -> None:
    watch = watch_of(path, "failed checksum")
    found = [fails(watch)]
    for text in ("three\n", "one\n"):  # of different sizes, because both writes may get the same timestamp
        path.write_text(text)
        found.append(fails(watch))

    assert found == [[], [0], []]


def test_checksum_check_reads_an_unchanged_file_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = watch_of(path, "changed checksum")
    watch.look()
    monkeypatch.setattr(guarded, "reopen", refuse)

    assert fails(watch) == []
    path.write_text("two")
    assert failure_texts(watch) == [f"cannot read {path}: not again"]


def refuse(*_: object) -> int:
    raise OSError(0, "not again")


def test_slow_checksum_is_a_data_access_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path_checks, "MAX_DIGEST_S", -1.0)

    assert failure_texts(watch_of(path, "changed checksum")) == [
        f"cannot read {path}: its checksum takes more than -1 seconds",
    ]


def test_path_check_of_a_missing_path_has_no_findings(tmp_path: Path) -> None:
    """The service itself reports that the path is missing."""
    assert watch_of(tmp_path / "absent", "size > 5").look() == []


def test_path_check_with_an_unknown_user_or_group_is_a_data_access_error(path: Path) -> None:
    """monit behaves differently: it refuses to start if a rule's user or group does not exist."""
    watch = watch_of(path, "failed uid nobody-of-that-name", "failed gid nobody-of-that-name", "size > 5")

    assert failure_texts(watch) == [
        f"cannot read {path}: there is no user nobody-of-that-name; there is no group nobody-of-that-name"
    ]


@pytest.mark.parametrize("kind", ["file", "directory", "fifo"])
def test_path_check_requires_the_matching_file_type(tmp_path: Path, kind: str) -> None:
    paths = {name: tmp_path / name for name in ("file", "directory", "fifo", "socket")}
    paths["file"].touch()
    paths["directory"].mkdir()
    os.mkfifo(paths["fifo"])
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(paths["socket"]))

    found = {name: failure_texts(watch_of(each, "failed permission 7777", kind=kind)) for name, each in paths.items()}

    nouns = {"file": "a regular file", "directory": "a directory", "fifo": "a fifo"}
    assert found.pop(kind)[0].startswith("permission of ")
    assert found == {name: [f"{paths[name]} is not {nouns[kind]}"] for name in found}


def test_path_check_does_not_read_content_through_a_symlink_owned_by_a_job(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job could otherwise use a symlink to make root read any file. A rule about the size is still evaluated, because
    a file's size is not secret.
    """
    link = path.with_name("link")
    link.symlink_to(path)
    monkeypatch.setattr(trusted_path, "trusted_users", lambda: {12345})

    assert fails(watch_of(link, "size > 3")) == [0]
    for test in ("changed checksum", "match 'x'"):
        watch = watch_of(link, test)
        watch.look()
        append(path, "x\n")
        assert failure_texts(watch) == [
            f"cannot read {link}: the path contains a link, 'link', of user {os.geteuid()}"
        ], test


def test_filesystem_flags_check_reports_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = [0]
    monkeypatch.setattr(path_checks, "usage", lambda _: {"flags": flags[0]})
    watch = watch_of(tmp_path, "space > 5 %", kind="filesystem")
    found = []
    for flags[0] in (0, 0, 1, 1, 0):
        found.append([number for number, _ in watch.look()])

    # Rule 1 is the implicit check that the path can be read, rule 2 the implicit check of the flags.
    assert found == [[1], [1], [2, 1], [1], [2, 1]]


# --- lines ------------------------------------------------------------------------------------------------------------


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_match_check_compares_new_complete_lines(path: Path) -> None:
    """Lines are new if they were written after the first cycle. A partial line is compared once it is complete."""
    watch = watch_of(path, "match 'o'", "not match 'o'")
    assert fails(watch) == []
    append(path, "two\nthree\nfo")
    assert fails(watch) == [0, 1]
    assert fails(watch) == []
    append(path, "ur\n")
    assert fails(watch) == [0]


def test_match_check_reads_a_new_or_truncated_file_from_its_start(path: Path) -> None:
    watch = watch_of(path, "match 'o'")
    watch.look()
    path.write_text("o\n")
    assert fails(watch) == [0]
    path.rename(path.with_name("old"))
    path.write_text("o\no\no\n")
    assert fails(watch) == [0, 0, 0]


def test_match_check_skips_ignored_lines_for_all_rules(path: Path) -> None:
    watch = watch_of(path, "match 'o'", "ignore match '^#'", "ignore not match 'e'")
    watch.look()
    append(path, "# one\ntwo\none\n")

    assert failure_texts(watch) == ["content matches [one]"]


def test_match_check_compares_the_beginning_of_a_long_line(path: Path) -> None:
    """As in monit, the first 511 bytes of a line are compared. This also applies to a line that is too long to be read
    in one cycle.
    """
    watch = watch_of(path, "match 'x$'", "match 'y'")
    watch.look()
    append(path, f"{'x' * 600}y\n")
    assert fails(watch) == [0]
    append(path, "x" * (path_checks.MAX_LOOK_BYTES + 10))
    assert fails(watch) == [0]
    append(path, "\n")
    assert fails(watch) == [0]


def test_match_check_ends_a_line_at_a_null_byte(path: Path) -> None:
    """monit does the same, because its strings end at a null byte."""
    watch = watch_of(path, "match 'x'")
    watch.look()
    append(path, "x\0y\ny\0x\n")

    assert failure_texts(watch) == ["content matches [x]"]


def test_match_check_limits_matching_lines_per_cycle(path: Path) -> None:
    """Each matching line may run a program, so lines beyond the limit are compared in the next cycle."""
    watch = watch_of(path, "match 'x'")
    watch.look()
    append(path, "x\n" * (path_checks.MAX_HITS + 5))

    assert len(fails(watch)) == path_checks.MAX_HITS
    assert len(fails(watch)) == 5


def test_match_check_limits_the_findings_about_lines_that_do_not_match(path: Path) -> None:
    """Consecutive lines without a match produce at most 64 findings, because more would not change what a rule does."""
    watch = watch_of(path, "match 'x'")
    watch.look()
    append(path, "y\n" * 10_000 + "x\n")
    found = [finding.fails for number, finding in watch.look() if number == 0]

    assert found == [False] * 64 + [True]


def test_path_check_includes_implicit_monit_rules() -> None:
    (spec,) = plan([JobFile("job", "", "check fifo it with path /x\n if timestamp > 5 then alert\n")])

    assert [type(rule.test).__name__ for rule in spec.rules] == ["Limit", "WrongType", "Unreadable"]
    assert parser.parse("check fifo it with path /x", origin="x").services[0].rules == ()
