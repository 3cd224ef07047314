"""Tests atomic writes, directories with given modes, and symlinks that are not followed."""

from __future__ import annotations

import errno
import os
import stat
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from agent_shim.core.errors import HostError
from agent_shim.host import capabilities, files, trusted_path
from tests.support.users import as_ordinary_user


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def names_in(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


# --- write_atomic -----------------------------------------------------------------------------------------------------


def test_atomically_written_file_has_the_given_content_and_mode(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    before = os.umask(0o077)
    try:
        files.write_atomic(path, b"new", mode=0o646)
    finally:
        os.umask(before)

    assert path.read_bytes() == b"new"
    assert mode_of(path) == 0o646
    assert names_in(tmp_path) == ["a.json"]


def test_partly_written_file_is_readable_only_by_its_owner(tmp_path: Path) -> None:
    """If the new file had its final mode from the beginning, other users could open it before it was complete."""
    before = os.umask(0)
    try:
        with files.replacing(tmp_path / "a.json", mode=0o644) as file:
            file.write(b"new")
            half = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    finally:
        os.umask(before)

    assert half == 0o600


def test_write_syncs_the_content_before_the_rename_and_then_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    synced = []

    def fsync(fd: int) -> None:
        is_directory = stat.S_ISDIR(os.fstat(fd).st_mode)
        written = b"" if is_directory else Path(f"/proc/self/fd/{fd}").read_bytes()
        synced.append(("directory" if is_directory else "file", path.read_bytes(), written))

    monkeypatch.setattr(os, "fsync", fsync)
    files.write_atomic(path, b"new")

    assert synced == [("file", b"old", b"new"), ("directory", b"new", b"")]


def test_atomic_write_replaces_a_symlink_instead_of_following_it(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    (tmp_path / "a").symlink_to(victim)
    files.write_atomic(tmp_path / "a", b"new")

    assert victim.read_bytes() == b"mine"
    assert not (tmp_path / "a").is_symlink()


def test_unchanged_file_is_not_written_again(tmp_path: Path) -> None:
    path, link = tmp_path / "a", tmp_path / "link"
    for content, same in ((b"1", False), (b"1", True), (b"2", False)):
        before = files.version(path)
        files.write_atomic(path, content, if_changed=True)
        assert path.read_bytes() == content
        assert (files.version(path) == before) is same
    link.symlink_to(path)
    files.write_atomic(link, b"2", if_changed=True)

    assert not link.is_symlink()


def _full(_: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


# --- failures ---------------------------------------------------------------------------------------------------------


def test_failed_atomic_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")

    monkeypatch.setattr(os, "fsync", _full)
    with pytest.raises(HostError, match=f"cannot write {path}: No space left on device") as caught:
        files.write_atomic(path, b"new")

    assert caught.value.errno == errno.ENOSPC
    assert path.read_bytes() == b"old"
    assert names_in(tmp_path) == ["a"]


def test_mounted_file_is_written_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the container runtime has mounted the file, it cannot be replaced, and its directory may be read-only."""
    path = tmp_path / "hosts"
    path.write_bytes(b"a longer old text")
    before = path.stat().st_ino
    monkeypatch.setattr(files, "is_mount_point", lambda it: it == path)
    files.write_atomic(path, b"new", mode=0o600)

    assert path.read_bytes() == b"new"
    assert path.stat().st_ino == before


def test_symlink_to_a_mount_point_is_replaced(tmp_path: Path) -> None:
    """Only a path that is itself a mount point is written in place. ``/proc`` is a mount point on every machine."""
    link = tmp_path / "state"
    link.symlink_to("/proc")
    files.write_atomic(link, b"new")

    assert not link.is_symlink()
    assert link.read_bytes() == b"new"


@pytest.mark.parametrize("target", ["/dev/zero", "../outside", "below/../../outside"])
def test_agent_file_is_not_read_or_written_through_a_symlink_out_of_its_directory(tmp_path: Path, target: str) -> None:
    (tmp_path / "outside").write_bytes(b"outside")
    own = tmp_path / "own"
    (own / "below").mkdir(parents=True)
    (own / "state").symlink_to(target)

    with pytest.raises(OSError, match="it is not a regular file"):
        files.read(own / "state", is_own=True)
    files.write_atomic(files.behind(own / "state"), b"mine")

    assert files.read(own / "state", is_own=True) == b"mine"
    assert (tmp_path / "outside").read_bytes() == b"outside"


def test_agent_file_is_read_through_at_most_one_symlink(tmp_path: Path) -> None:
    """If the agent keeps a file on a tmpfs, it puts a symlink in the file's usual place."""
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/state").write_bytes(b"kept")
    (tmp_path / "state").symlink_to("memory/state")
    assert files.read(tmp_path / "state", is_own=True) == b"kept"

    (tmp_path / "memory/state").unlink()
    (tmp_path / "memory/state").symlink_to("/dev/zero")
    with pytest.raises(OSError, match="it is not a regular file"):
        files.read(tmp_path / "state", is_own=True)


# --- make_dir, chown --------------------------------------------------------------------------------------------------


def test_new_directory_has_the_given_mode_despite_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    before = os.umask(0o077)
    try:
        files.make_dir(path, 0o1777)
        files.make_dir(path, 0o750)
    finally:
        os.umask(before)

    assert mode_of(path) == 0o750


def test_directory_is_created_through_symlinks_owned_by_the_same_user(tmp_path: Path) -> None:
    (tmp_path / "real" / "deep").mkdir(parents=True)
    (tmp_path / "file").touch()
    (tmp_path / "relative").symlink_to("real/deep")
    (tmp_path / "absolute").symlink_to(tmp_path / "real" / "deep")
    files.make_dir(tmp_path / "relative" / "r", 0o700)
    files.make_dir(tmp_path / "absolute" / "a", 0o700)

    assert names_in(tmp_path / "real") == ["deep"]
    assert names_in(tmp_path / "real" / "deep") == ["a", "r"]
    with pytest.raises(HostError, match="Not a directory"):
        files.make_dir(tmp_path / "file" / "x", 0o700)


def test_directory_is_not_created_through_symlinks_owned_by_other_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user who can write to a directory could create a symlink in it that points anywhere."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.setattr(trusted_path, "trusted_users", lambda: {os.geteuid() + 1})

    with pytest.raises(HostError, match="the path contains a link, 'link', of user"):
        files.make_dir(tmp_path / "link" / "a", 0o700)
    assert names_in(tmp_path / "real") == []


@pytest.mark.attack("a job puts a link into a path in which root creates, opens or chowns files")
def test_symlink_in_place_of_a_new_directory_is_rejected(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir(0o700)
    (tmp_path / "a").symlink_to(victim)
    with pytest.raises(HostError, match=f"cannot make the directory {tmp_path}/a"):
        files.make_dir(tmp_path / "a", 0o777)

    assert mode_of(victim) == 0o700


@pytest.mark.root
def test_chown_sets_user_and_group(tmp_path: Path) -> None:
    files.make_dir(tmp_path / "d", 0o700, "daemon:bin")
    files.write_atomic(tmp_path / "f", b"", owner="daemon:bin")
    (tmp_path / "l").symlink_to("f")
    files.chown(tmp_path / "l", "bin:daemon")

    owners = {path.name: (path.lstat().st_uid, path.lstat().st_gid) for path in tmp_path.iterdir()}
    assert owners == {"d": (1, 2), "f": (1, 2), "l": (2, 1)}


@pytest.mark.root
@pytest.mark.parametrize(("owner", "ids"), [("daemon:root", (1, 0)), ("root:daemon", (0, 1))])
def test_chown_changes_only_what_differs(tmp_path: Path, owner: str, ids: tuple[int, int]) -> None:
    files.write_atomic(tmp_path / "f", b"", owner=owner)

    assert ((tmp_path / "f").stat().st_uid, (tmp_path / "f").stat().st_gid) == ids


@pytest.mark.root
def test_chown_without_the_capability_keeps_the_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without CAP_CHOWN, a requested owner is ignored so that the agent can still write the file."""
    monkeypatch.setattr(capabilities, "privileges", lambda: SimpleNamespace(effective=frozenset()))
    files.can_chown.cache_clear()
    try:
        assert files.owner_ids("daemon:bin") == (-1, -1)
    finally:
        files.can_chown.cache_clear()


@pytest.mark.root
@pytest.mark.parametrize(("owner", "what"), [("nobody-here:root", "user"), ("root:nobody-here", "group")])
def test_chown_error_names_the_unknown_user_or_group(tmp_path: Path, owner: str, what: str) -> None:
    with pytest.raises(HostError, match=f"cannot give .* to {owner}: there is no {what} nobody-here"):
        files.chown(tmp_path, owner)


def test_ordinary_user_changes_no_owners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    files.chown(tmp_path, "nobody-here:nobody-here")
    files.make_dir(tmp_path / "a", 0o750, "root:vcap")
    files.write_atomic(tmp_path / "b", b"", owner="root:vcap")

    assert names_in(tmp_path) == ["a", "b"]


# --- links, removal ---------------------------------------------------------------------------------------------------


def test_symlink_to_a_directory_is_swapped_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = tmp_path / "link"
    (tmp_path / "one").mkdir()
    files.swap_link(tmp_path / "one", link)
    removed: list[Path] = []
    monkeypatch.setattr(files, "remove_tree", removed.append)

    files.swap_link(tmp_path / "two", link)

    assert removed == []
    assert link.readlink() == tmp_path / "two"


def test_symlink_swap_replaces_a_real_directory(tmp_path: Path) -> None:
    """An image may contain a directory in place of the symlink."""
    link = tmp_path / "link"
    (link / "below").mkdir(parents=True)
    files.swap_link(tmp_path, link)

    assert link.is_symlink()


def test_failed_symlink_swap_keeps_the_old_symlink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = tmp_path / "link"
    files.swap_link(tmp_path / "one", link)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(HostError, match="cannot link .* No space left"):
        files.swap_link(tmp_path / "two", link)

    assert link.readlink() == tmp_path / "one"
    assert names_in(tmp_path) == ["link"]


def test_tree_removal_follows_no_symlinks(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "kept").touch()
    tree = tmp_path / "tree"
    (tree / "below").mkdir(parents=True)
    (tree / "below" / "link").symlink_to(victim)
    (tmp_path / "link").symlink_to(victim)
    for path in (tree, tmp_path / "link", tmp_path / "absent"):
        files.remove_tree(path)

    assert names_in(tmp_path) == ["victim"]
    assert names_in(victim) == ["kept"]


def test_tree_of_any_depth_is_removed(tmp_path: Path) -> None:
    """A job can nest thousands of directories, which exceeds the limits for path length and recursion."""
    tree = tmp_path / "tree"
    tree.mkdir()
    here = os.open(tree, os.O_RDONLY)
    for _ in range(2 * sys.getrecursionlimit() + 100):
        os.mkdir("deep", dir_fd=here)
        below = os.open("deep", os.O_RDONLY, dir_fd=here)
        os.close(os.open("file", os.O_CREAT, dir_fd=here))
        os.close(here)
        here = below
    os.close(here)

    files.remove_tree(tree)

    assert names_in(tmp_path) == []


def test_read_only_tree_is_removed() -> None:
    """To remove a read-only tree, such as a Go module cache, an ordinary user first has to change the modes in it."""
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch, "tree")
        directories = [tree / "a/b/c", tree / "a/b", tree / "a", tree]
        directories[0].mkdir(parents=True)
        (directories[0] / "file").touch()
        for directory in directories:
            directory.chmod(0o500)
        with as_ordinary_user(Path(scratch), *directories):
            files.remove_tree(tree)

        assert names_in(Path(scratch)) == []


def test_temporary_files_are_recognized_by_their_names(tmp_path: Path) -> None:
    path = tmp_path / "a"
    found = files.sibling(path)

    assert found.parent == tmp_path
    assert files.is_leftover(found.name)
    assert files.sibling(path) != found
    assert not any(map(files.is_leftover, ["a", ".a", "a.tmp-1", ".profile", "0a1b"]))


def test_reading_a_directory_as_a_file_leaks_no_descriptor(tmp_path: Path) -> None:
    """The settings path, which is read twice a second, may be a directory by mistake, so leaks would add up."""
    with pytest.raises(OSError, match="it is not a regular file"):
        files.read(tmp_path)


@pytest.mark.parametrize("size", [0, 4, files.CHUNK_BYTES, files.CHUNK_BYTES + 1, 5 * files.CHUNK_BYTES])
def test_file_whose_size_equals_the_limit_is_read(tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    (tmp_path / "f").write_bytes(content)

    assert files.read(tmp_path / "f", size) == content
    assert files.read(tmp_path / "f") == content


def test_proc_file_without_a_size_is_read_up_to_the_limit() -> None:
    mappings = Path("/proc/self/smaps")

    assert mappings.stat().st_size == 0
    assert files.read(mappings).endswith(mappings.read_bytes()[-20:])
    with pytest.raises(OSError, match="more than 100 bytes"):
        files.read(mappings, 100)


# --- copies -----------------------------------------------------------------------------------------------------------


def test_file_is_copied_from_the_current_offset(tmp_path: Path) -> None:
    data = os.urandom(300_000)
    (tmp_path / "a").write_bytes(data)
    with (tmp_path / "a").open("rb") as source, (tmp_path / "b").open("wb") as target:
        os.lseek(source.fileno(), 7, os.SEEK_SET)
        files.copy_data(source.fileno(), target.fileno())

    assert (tmp_path / "b").read_bytes() == data[7:]
