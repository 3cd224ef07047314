"""Tests guarded opens, with which root accesses files in directories that jobs can write to."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import socket
import stat
import threading
from pathlib import Path

import pytest

from agent_shim.core.errors import HostError
from agent_shim.host import guarded


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


# --- opening paths relative to a directory ----------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Create a directory with a file two levels down, and with symlinks that lead to a secret outside the directory."""
    tree = tmp_path / "tree"
    (tree / "a" / "b").mkdir(parents=True)
    (tree / "a" / "b" / "file").write_bytes(b"inside")
    (tmp_path / "secret").write_bytes(b"secret")
    (tree / "file-link").symlink_to(tmp_path / "secret")
    (tree / "dir-link").symlink_to("a")
    (tree / "up").symlink_to("..")
    (tree / "magic").symlink_to("/proc/self/root")
    return tree


def beneath(tree: Path, path: str, flags: int = os.O_RDONLY, mode: int = 0) -> bytes:
    directory = os.open(tree, os.O_PATH | os.O_DIRECTORY)
    try:
        fd = guarded.open_beneath(directory, path, flags, mode)
    finally:
        os.close(directory)
    with os.fdopen(fd, "rb") as file:
        return file.read()


def test_guarded_open_opens_a_plain_path(tree: Path) -> None:
    assert beneath(tree, "a/b/file") == b"inside"
    assert beneath(tree, "./a//b/./file") == b"inside"


def test_guarded_open_creates_a_file_with_the_given_mode(tree: Path) -> None:
    beneath(tree, "a/new", os.O_RDONLY | os.O_CREAT | os.O_EXCL, 0o600)

    assert mode_of(tree / "a" / "new") == 0o600


def test_guarded_open_with_o_path_does_not_open_the_file(tree: Path) -> None:
    os.mkfifo(tree / "a" / "pipe")
    directory = os.open(tree, os.O_PATH | os.O_DIRECTORY)
    held = guarded.open_beneath(directory, "a/pipe", os.O_PATH)
    kind = stat.S_IFMT(os.fstat(held).st_mode)
    for each in (directory, held):
        os.close(each)

    assert kind == stat.S_IFIFO


def test_guarded_open_rejects_a_path_outside_its_root(tree: Path) -> None:
    for path, root in ((tree / "a", tree / "a" / "b"), (tree / "secret", tree / "a"), (Path("a"), Path("/a"))):
        with pytest.raises(ValueError, match="is not below"), guarded.held(path, root):
            pass


@pytest.mark.attack("a job puts a link into a path in which root creates, opens or chowns files")
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_PATH])
@pytest.mark.parametrize(
    "path",
    [
        "file-link",
        "dir-link/b/file",
        "up/secret",
        "magic/etc/passwd",
        "../secret",
        "a/../../secret",
        "/etc/passwd",
        "",
        "a/..",
        "a/b/absent",
        "a/b/file\0",
    ],
)
def test_guarded_open_rejects_symlinks_and_parent_directories(tree: Path, path: str, flags: int) -> None:
    with pytest.raises(HostError, match="cannot open"):
        beneath(tree, path, flags)


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("a/b/absent", errno.ENOENT),
        ("a/b/file/x", errno.ENOTDIR),
        ("file-link", errno.ELOOP),
        ("dir-link/b", errno.ELOOP),
    ],
)
def test_guarded_open_error_has_the_errno(tree: Path, path: str, code: int) -> None:
    """Callers need the errno, because they ignore a missing path but not a symlink."""
    with pytest.raises(HostError, match="cannot open") as caught:
        beneath(tree, path, os.O_RDONLY)

    assert caught.value.errno == code


@pytest.mark.attack("a job puts a link into a path in which root creates, opens or chowns files")
def test_guarded_open_is_safe_while_a_directory_is_swapped_with_a_symlink(tree: Path) -> None:
    (tree / "evil").symlink_to("..")
    (tree / "real").mkdir()
    (tree / "real" / "secret").write_bytes(b"inside")
    done = threading.Event()

    def exchange() -> None:
        while not done.is_set():
            for name in ("real", "evil"):
                (tree / name).rename(tree / "now")
                (tree / "now").rename(tree / name)

    attacker = threading.Thread(target=exchange)
    attacker.start()
    try:
        for _ in range(3000):
            with contextlib.suppress(HostError):
                assert beneath(tree, "now/secret") == b"inside"
    finally:
        done.set()
        attacker.join()


def test_guarded_error_escapes_file_names(tree: Path) -> None:
    """Jobs choose file names, so line breaks, escape sequences and invalid UTF-8 must not reach a log or terminal."""
    name = os.fsdecode(b"x\n\x1b[2J\xff")
    with pytest.raises(HostError) as caught:
        beneath(tree, name)

    assert str(caught.value).isprintable()


# --- opening absolute paths -------------------------------------------------------------------------------------------


def test_guarded_read_follows_symlinks_owned_by_the_same_user_but_not_below_its_root(tree: Path) -> None:
    """The path may lead through symlinks that the agent trusts, such as ``/var/vcap/sys``. Symlinks below a given root
    directory are not followed.
    """
    assert guarded.head(tree / "dir-link" / "b" / "file", 100) == b"inside"
    assert guarded.head(tree / "up" / "secret", 100) == b"secret"
    with pytest.raises(OSError, match="cannot open file-link"):
        guarded.head(tree / "file-link", 100, tree)
    assert guarded.head(tree / "dir-link" / "b" / "file", 100, tree / "dir-link") == b"inside"


@pytest.mark.parametrize("path", ["absent", "a/absent/file", "a/b/file/x", "a/no\0name"])
def test_guarded_read_of_a_missing_or_invalid_path_fails(tree: Path, path: str) -> None:
    with pytest.raises((OSError, ValueError), match="absent|file|null"):
        guarded.head(tree / path, 100)


def status(mode: int, owner: int, links: int = 1) -> os.stat_result:
    return os.stat_result((mode, 1, 1, links, owner, 0, 0, 0, 0, 0))


def test_guarded_open_checks_hard_links_only_if_a_root_directory_is_given(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without ``root``, the path is in the agent's own directories, where jobs cannot create hard links."""
    counted: list[int] = []
    monkeypatch.setattr(guarded, "refuse_second_name", lambda found: counted.append(found.st_ino))
    path = tree / "a" / "b" / "file"
    for root in (None, tree):
        os.close(guarded.open_file(path, root))

    assert counted == [path.stat().st_ino]


@pytest.mark.parametrize(
    ("mode", "owner", "links", "is_read"),
    [
        (stat.S_IFREG, 0, 1, True),
        (stat.S_IFREG, 0, 2, False),
        (stat.S_IFREG, 1000, 2, True),
        (stat.S_IFDIR, 0, 5, True),
    ],
)
def test_guarded_read_rejects_hard_linked_files_owned_by_root(mode: int, owner: int, links: int, is_read: bool) -> None:
    """A job can hard-link root's files into its own directory. Files owned by jobs may have any number of links."""
    with contextlib.nullcontext() if is_read else pytest.raises(OSError, match="second hard link"):
        guarded.refuse_second_name(status(mode, owner, links))


@pytest.mark.attack("a job tricks root into opening a FIFO or a device")
@pytest.mark.parametrize("what", ["fifo", "socket", "device", "directory", "proc"])
def test_guarded_open_rejects_non_regular_files(tmp_path: Path, what: str) -> None:
    """The read must fail immediately. Opening a FIFO without a writer, for example, would otherwise block forever."""
    path = tmp_path / "thing"
    if what == "fifo":
        os.mkfifo(path)
    elif what == "socket":
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(str(path))
    elif what == "device":
        path = Path("/dev/tty")
    elif what == "directory":
        path.mkdir()
    else:
        path = Path("/proc/self/fd/0")
        if path.is_file():
            path = Path("/dev/null")
    with pytest.raises(OSError, match=r"not a regular file|cannot open"):
        guarded.tail(path, 100, None)
    with pytest.raises(OSError, match=r"not a regular file|second hard link|exists|Permission|directory"):
        os.close(guarded.open_log(path, 0o600))


def test_guarded_open_does_not_wait_for_a_file_lease(tmp_path: Path) -> None:
    """While another process has a lease on the file, the kernel blocks each open for up to 45 seconds unless
    ``O_NONBLOCK`` is set.
    """
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # the kernel sends this signal to the process with the lease
    path = tmp_path / "x.log"
    path.write_bytes(b"text")
    with path.open("rb+") as owner:
        fcntl.fcntl(owner.fileno(), fcntl.F_SETLEASE, fcntl.F_WRLCK)
        for look in (lambda: guarded.tail(path, 10), lambda: guarded.open_log(path, 0o600)):
            with pytest.raises(BlockingIOError):
                look()
        fcntl.fcntl(owner.fileno(), fcntl.F_SETLEASE, fcntl.F_UNLCK)
    signal.signal(signal.SIGIO, before)


def test_guarded_read_has_a_size_limit(tmp_path: Path) -> None:
    path = tmp_path / "huge"
    with path.open("wb") as file:
        file.truncate(1 << 42)
        file.seek(0, os.SEEK_END)
        file.write(b"end")
    assert guarded.tail(path, 5) == b"\0\0end"
    assert guarded.head(path, 4) == bytes(4)
    path.write_bytes(b"x" * 1000)
    assert guarded.head(path, 2000) == guarded.tail(path, 2000) == b"x" * 1000


def test_guarded_data_search_skips_holes_in_sparse_files(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        for number in range(6):
            file.seek(number << 20)
            file.write(b"x")
        file.flush()
        found = list(guarded.segments(file.fileno(), 0, (5 << 20) + 1))
        assert sum(end - begin for begin, end in found) < 1 << 20
        assert [begin >> 20 for begin, _ in found] == list(range(6))
        assert list(guarded.segments(file.fileno(), 0, 0)) == []
        # A range that ends where the next data begins contains no data.
        assert list(guarded.segments(file.fileno(), found[0][1], 1 << 20)) == []
        file.truncate(1 << 24)
        # Everything from 8 MiB to the end is a hole.
        assert list(guarded.segments(file.fileno(), 8 << 20, 1 << 24)) == []


def test_guarded_data_search_stops_at_the_requested_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log may grow while it is being read."""
    (tmp_path / "log").write_bytes(b"x" * 100)
    looks = 0
    look = os.lseek

    def counted(*arguments: int) -> int:
        nonlocal looks
        looks += 1
        assert looks < 10
        return look(*arguments)

    with (tmp_path / "log").open("rb") as file:
        monkeypatch.setattr(os, "lseek", counted)
        assert list(guarded.segments(file.fileno(), 0, 40)) == [(0, 40)]


# --- appending --------------------------------------------------------------------------------------------------------


def test_guarded_log_is_created_and_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    for text in (b"a", b"b"):
        descriptor = guarded.open_log(path, 0o640)
        assert os.get_blocking(descriptor)
        os.write(descriptor, text)
        os.close(descriptor)
    assert path.read_bytes() == b"ab"
    assert mode_of(path) == 0o640


def test_guarded_log_is_readable_only_by_its_owner_while_it_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, modes = tmp_path / "x.log", []
    fchmod = os.fchmod

    def look(descriptor: int, mode: int) -> None:
        modes.append(mode_of(path))
        fchmod(descriptor, mode)

    monkeypatch.setattr(os, "fchmod", look)
    os.close(guarded.open_log(path, 0o644))

    assert modes == [0o600]
    assert mode_of(path) == 0o644


@pytest.mark.parametrize("what", ["link", "dangling link", "second name"])
def test_guarded_log_is_not_opened_through_a_symlink_or_second_hard_link(tmp_path: Path, what: str) -> None:
    victim, path = tmp_path / "victim", tmp_path / "x.log"
    if what != "dangling link":
        victim.write_bytes(b"")
    path.hardlink_to(victim) if what == "second name" else path.symlink_to(victim)
    with pytest.raises(OSError, match="second hard link|not a regular file"):
        guarded.open_log(path, 0o640)
    assert not victim.exists() or victim.read_bytes() == b""


# --- directories ------------------------------------------------------------------------------------------------------


def test_guarded_walk_finds_regular_files_without_following_symlinks(tree: Path) -> None:
    (tree / "c.log").touch()
    os.mkfifo(tree / "a" / "fifo")
    top = os.open(tree, os.O_PATH)
    try:
        assert sorted(entry.path for entry in guarded.walk(top, depth=3, limit=100)) == ["a/b/file", "c.log"]
        assert [entry.path for entry in guarded.walk(top, depth=1, limit=100)] == ["c.log"]
        assert [entry.path for entry in guarded.walk(top, "a", depth=2, limit=100)] == ["a/b/file"]
        assert list(guarded.walk(top, "dir-link", depth=2, limit=100)) == []
    finally:
        os.close(top)


def test_guarded_directory_listing_has_a_limit(tree: Path) -> None:
    top = os.open(tree, os.O_RDONLY)
    try:
        assert [len(guarded.names(top, limit)) for limit in (0, 1, 3, 100)] == [0, 1, 3, 5]
    finally:
        os.close(top)


def test_guarded_walk_stops_at_its_limit_and_reports_it(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number}").touch()
    top = os.open(tmp_path, os.O_PATH)
    skipped: list[str] = []
    try:
        assert len(list(guarded.walk(top, depth=1, limit=20, skipped=lambda path, _: skipped.append(path)))) == 20
        assert skipped == []
        assert len(list(guarded.walk(top, depth=1, limit=7, skipped=lambda path, _: skipped.append(path)))) == 7
    finally:
        os.close(top)
    assert skipped == [""]


def test_guarded_walk_returns_undecodable_names(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"\xff\n.log")).touch()
    top = os.open(tmp_path, os.O_PATH)
    try:
        assert [os.fsencode(entry.path) for entry in guarded.walk(top, depth=1, limit=7)] == [b"\xff\n.log"]
    finally:
        os.close(top)
