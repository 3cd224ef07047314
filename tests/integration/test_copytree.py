"""A copy is exact, follows no links, removes only allowed files, and resumes after a kill."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from agent_shim.bulk import copytree, protocol
from agent_shim.core.errors import HostError
from tests.support.volumes import fill, fingerprint

ROOT = os.geteuid() == 0


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A source with one of everything, and an empty target."""
    fill(tmp_path / "from", as_root=ROOT)
    (tmp_path / "to").mkdir()
    return tmp_path / "from", tmp_path / "to"


def test_a_copy_is_exact(pair: tuple[Path, Path]) -> None:
    source, target = pair
    source.chmod(0o751)

    copytree.mirror(source, target)

    assert fingerprint(target) == fingerprint(source)
    assert target.stat().st_mode == source.stat().st_mode


@pytest.mark.parametrize(("refusal", "is_fatal"), [(errno.ENOTSUP, False), (errno.EIO, True)])
def test_a_volume_without_attributes_is_copied_and_a_broken_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: int, is_fatal: bool
) -> None:
    """NFS has no extended attributes. An error of the disk is never taken for that."""
    source, target = tmp_path / "from", tmp_path / "to"
    for path in (source, target):
        path.mkdir()
    (source / "data").write_text("1")

    def refused(_: int) -> list[str]:
        raise OSError(refusal, os.strerror(refusal))

    monkeypatch.setattr(os, "listxattr", refused)

    with pytest.raises((HostError, OSError)) if is_fatal else nullcontext():
        copytree.mirror(source, target)
    assert is_fatal or (target / "data").read_text() == "1"


def test_the_source_is_not_touched(pair: tuple[Path, Path]) -> None:
    source, target = pair
    before = fingerprint(source)

    copytree.mirror(source, target)

    assert fingerprint(source) == before


def test_holes_stay_holes(pair: tuple[Path, Path]) -> None:
    source, target = pair

    copytree.mirror(source, target)

    assert (target / "sparse").stat().st_blocks * 512 < 1 << 20


def test_a_finished_copy_is_not_made_again(pair: tuple[Path, Path]) -> None:
    source, target = pair
    copytree.mirror(source, target)
    before = {path: path.lstat().st_ino for path in target.rglob("*")}

    copytree.mirror(source, target)

    assert {path: path.lstat().st_ino for path in target.rglob("*")} == before


def replace_by_link(path: Path, target: str) -> None:
    path.unlink()
    path.symlink_to(target)


def replace_by_file(path: Path) -> None:
    path.unlink()
    path.write_bytes(b"alone")


def replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_name_of(path: Path, other: Path) -> None:
    path.unlink()
    os.link(other, path)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda target: (target / "twin").unlink(),
        lambda target: (target / "surplus").write_text("x"),
        lambda target: (target / "db/surplus").mkdir(),
        lambda target: (target / "setgid").chmod(0o755),
        lambda target: os.setxattr(target / "db/data", "user.checksum", b"other"),
        lambda target: os.setxattr(target / "twin", "user.more", b"x"),
        lambda target: os.setxattr(target / "db", "user.more", b"x"),
        lambda target: os.utime(target / "db/wal"),
        lambda target: replace_by_link(target / "to data", "db/wal"),
        lambda target: replace_by_name_of(target / "twin", target / "another twin"),
        lambda target: replace_by_file(target / "a third name"),
        lambda target: replace_by_file(target / "pipe"),
        lambda target: replace_by_directory(target / "tool"),
    ],
)
def test_what_differs_is_put_right(pair: tuple[Path, Path], spoil: Callable[[Path], object]) -> None:
    source, target = pair
    copytree.mirror(source, target)
    spoil(target)

    copytree.mirror(source, target)

    assert fingerprint(target) == fingerprint(source)


def test_rot_is_found_by_reading(pair: tuple[Path, Path]) -> None:
    """A file whose data a power failure took looks right: only a comparison tells."""
    source, target = pair
    copytree.mirror(source, target)
    spoilt = target / "db/data"
    status = spoilt.stat()
    with spoilt.open("r+b") as file:
        file.seek(200_000)
        file.write(b"\0" * 100)
    os.utime(spoilt, ns=(status.st_atime_ns, status.st_mtime_ns))

    copytree.mirror(source, target)

    assert fingerprint(target) == fingerprint(source)


def test_a_hole_that_should_be_data_is_found(pair: tuple[Path, Path]) -> None:
    source, target = pair
    copytree.mirror(source, target)
    status = (target / "sparse").stat()
    with (target / "sparse").open("r+b") as file:
        file.seek(3 << 20)
        file.write(b"dirt")
    os.utime(target / "sparse", ns=(status.st_atime_ns, status.st_mtime_ns))

    copytree.mirror(source, target)

    assert fingerprint(target) == fingerprint(source)


def test_spared_names_are_left_alone_on_both_sides(pair: tuple[Path, Path]) -> None:
    source, target = pair
    for directory, text in ((source, "old"), (target, "new")):
        (directory / "mine").mkdir()
        (directory / "mine/text").write_text(text)
    (target / "lost+found").mkdir()

    copytree.mirror(source, target, spared={"mine", "lost+found"})

    assert (target / "mine/text").read_text() == "new"
    assert (target / "lost+found").is_dir()


def test_no_link_in_the_target_is_followed(pair: tuple[Path, Path], tmp_path: Path) -> None:
    source, target = pair
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "data").write_text("precious")
    (target / "db").symlink_to(elsewhere)
    (target / "twin").symlink_to(elsewhere / "data")

    copytree.mirror(source, target)

    assert fingerprint(target) == fingerprint(source)
    assert [path.name for path in elsewhere.iterdir()] == ["data"]
    assert (elsewhere / "data").read_text() == "precious"


def test_a_directory_that_becomes_a_link_while_it_is_copied_ends_the_copy(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that lives may do so at any moment."""
    source, target = pair
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setattr(copytree, "REPORT_PERIOD_S", 0.0)

    def swap(progress: protocol.Progress) -> None:
        if progress.phase == "copying" and (target / "db").is_dir() and not (target / "db").is_symlink():
            (target / "db").rmdir()
            (target / "db").symlink_to(elsewhere)

    with pytest.raises(HostError):
        copytree.mirror(source, target, report=swap)
    assert list(elsewhere.iterdir()) == []


def test_a_source_that_never_rests_is_named(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = pair
    monkeypatch.setattr(copytree, "REPORT_PERIOD_S", 0.0)

    def disturb(progress: protocol.Progress) -> None:
        if progress.phase == "comparing":
            with (source / "twin").open("a") as file:
                file.write("more")

    with pytest.raises(HostError, match="these differ: twin"):
        copytree.mirror(source, target, report=disturb)


def test_an_entry_that_cannot_be_copied_is_named(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = pair

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)

    with pytest.raises(HostError, match="cannot copy a third name: No space left on device") as caught:
        copytree.mirror(source, target)
    assert caught.value.errno == 28


def test_progress_counts_files_and_data(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = pair
    monkeypatch.setattr(copytree, "REPORT_PERIOD_S", 0.0)
    seen: list[protocol.Progress] = []

    copytree.mirror(source, target, report=seen.append)

    assert list(dict.fromkeys(progress.phase for progress in seen)) == ["counting", "copying", "comparing"]
    last = seen[-1]
    assert last.files == last.files_total == len(list(source.rglob("*")))
    assert last.size == last.size_total > 300_000


def test_a_killed_copy_goes_on(tmp_path: Path) -> None:
    """Killed at many points: each time the next one finishes, and the source is as it was."""
    source, target = tmp_path / "from", tmp_path / "to"
    fill(source, as_root=ROOT)
    for number in range(400):
        (source / f"db/{number}").write_bytes(os.urandom(2000))
        if number % 20 == 0:
            os.link(source / f"db/{number}", source / f"db/wal/{number}")
    target.mkdir()
    wanted = fingerprint(source)
    for attempt in range(12):
        pid = os.fork()
        if pid == 0:
            copytree.mirror(source, target)
            os._exit(0)
        time.sleep(0.004 * (attempt + 1))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    copytree.mirror(source, target)

    assert fingerprint(target) == wanted
    assert fingerprint(source) == wanted


def test_what_is_compared_is_what_came_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that corrupts written data is detected, and the copy repeated."""
    source, target = tmp_path / "source", tmp_path / "target"
    for directory in (source, target):
        directory.mkdir()
    (source / "file").write_text("right")
    synced = []

    def spoil(place: Path) -> None:
        synced.append(place)
        if len(synced) == 1:
            (target / "file").write_text("wrong")

    monkeypatch.setattr(copytree.files, "sync_filesystem", spoil)  # type: ignore[attr-defined]
    copytree.mirror(source, target)

    assert (target / "file").read_text() == "right"
    assert synced == [target, target]


def test_a_deep_tree_takes_no_steps_from_its_top_for_each_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand levels cost a job a millisecond; twice as many directories take about twice as many steps."""
    steps = 0
    real = os.open

    def opened(*args: Any, **kwargs: Any) -> int:
        nonlocal steps
        steps += 1
        return real(*args, **kwargs)

    monkeypatch.setattr(os, "open", opened)
    taken = []
    for levels in (100, 400):
        source, target = tmp_path / f"source{levels}", tmp_path / f"target{levels}"
        source.joinpath(*["d"] * levels).mkdir(parents=True)
        target.mkdir()
        before, steps = len(list(Path("/proc/self/fd").iterdir())), 0
        copytree.mirror(source, target)
        taken.append(steps)

        assert len(list(Path("/proc/self/fd").iterdir())) == before
        assert target.joinpath(*["d"] * levels).is_dir()
    assert taken[1] < 6 * taken[0]


def test_a_tree_deeper_than_a_path_may_be_long_is_copied(tmp_path: Path) -> None:
    """A job needs no privilege to make one, and would have its disk stay where it is."""
    source, target = tmp_path / "source", tmp_path / "target"
    for top in (source, target):
        top.mkdir()
    name = "x" * 255
    here = os.open(source, os.O_RDONLY)
    for _ in range(40):
        os.mkdir(name, dir_fd=here)
        below = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    with open(os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=here), "w") as file:
        file.write("content")
    os.close(here)

    copytree.mirror(source, target)

    done = subprocess.run(["tar", "-C", target, "-c", "."], check=True, capture_output=True)
    assert b"content" in done.stdout


@pytest.mark.parametrize("seconds", [1, 2_000_000_000])
def test_a_time_that_the_other_disk_cannot_have_does_not_end_the_copy(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, seconds: int
) -> None:
    """On ext4 with small inodes times end in 2038; here they begin in 2001 and end in 2020. A job sets any time."""
    source, target = pair
    (source / "odd").write_text("text")
    os.utime(source / "odd", (seconds, seconds))
    within = os.utime

    def utime(path: Any, *, ns: tuple[int, int], **options: Any) -> None:
        accessed, modified = (min(max(each, 10**18), 1_600_000_000 * 10**9) for each in ns)
        within(path, ns=(accessed, modified), **options)

    monkeypatch.setattr(os, "utime", utime)
    copytree.mirror(source, target)

    assert (target / "odd").read_text() == "text"
    assert (target / "odd").stat().st_mtime in (1_000_000_000, 1_600_000_000)


def test_a_huge_directory_takes_the_memory_of_its_names_alone(pair: tuple[Path, Path]) -> None:
    """A job makes millions of them without an effort; sets of both sides took twice as much."""
    source, target = pair
    copytree.mirror(source, target)  # the first use loads more
    names = [f"session-{number:040d}" for number in range(5000)]
    for name in names:
        (source / name).touch()
    tracemalloc.start()
    try:
        copytree.mirror(source, target)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak < 3 * sum(map(sys.getsizeof, names))
